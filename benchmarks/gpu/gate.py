"""Who may use the device while several processes compile.

[Note: one at a time]
All processes compile at once, which takes most of the time and little device memory. What they have compiled they
must run to be ready, and if several did that at once their activations would not fit. So a process holds a lock while
it runs, and gives it up while it compiles, in the middle of a step too. Backward is compiled with forward, before
either runs: while a compiler works, next to nothing is saved for backward. Whoever holds it for too long has hung, and
would have all others wait in vain: its process ends, and its log says where it was.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch._dynamo.callback import callback_handler
from torch._functorch import config as functorch_config

_PATIENCE_S: Final = 75.0  # to make a model, or to run some steps of which all is compiled, takes seconds


class Gate:
    """A lock among processes; see [Note: one at a time].

    Args:
        path: of a file that all of them may write.
        patience_s: after which a process that still holds the lock is ended.
    """

    def __init__(self, path: Path, patience_s: float = _PATIENCE_S) -> None:
        self._file = path.open("w")
        self._patience_s = patience_s

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, but not while something is compiled; what the allocator keeps is given back at the end."""
        callback_handler.register_start_callback(self._release)
        callback_handler.register_end_callback(self._acquire)
        try:
            with functorch_config.patch(force_non_lazy_backward_lowering=True):
                self._acquire()
                yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            callback_handler.remove_start_callback(self._release)
            callback_handler.remove_end_callback(self._acquire)
            self._release()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock for something in the middle of a compilation that runs on the device."""
        self._acquire()
        try:
            yield
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        finally:
            self._release()

    def _acquire(self, _: Any = None) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        faulthandler.dump_traceback_later(self._patience_s, exit=True)

    def _release(self, _: Any = None) -> None:
        faulthandler.cancel_dump_traceback_later()
        fcntl.flock(self._file, fcntl.LOCK_UN)
