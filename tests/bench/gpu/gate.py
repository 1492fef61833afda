"""Who may use the device while several processes compile.

[Note: one at a time]
All processes compile at once, which takes most of the time and little device memory. What they have compiled they
must run to be ready, and if several did that at once their activations would not fit. So a process holds a lock while
it runs, and gives it up while it compiles, in the middle of a step too. Backward is compiled with forward, before
either runs: while a compiler works, next to nothing is saved for backward.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.callback import callback_handler
from torch._functorch import config as functorch_config


class Gate:
    """A lock among processes; see [Note: one at a time].

    Args:
        path: of a file that all of them may write.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

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

    def _acquire(self, _: Any = None) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def _release(self, _: Any = None) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
