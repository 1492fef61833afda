"""`fxshard_gloo`: torch's gloo with one thread, which survives collectives that overlap.

[Note: gloo]
Two threads work on the collectives of a group of torch's gloo, and each writes down the name of the one it completed,
without a lock (`ProcessGroupGloo::runLoop`). "ALLGATHER_COALESCED", as functional all_gathers are called there, is too
long a name to be stored in place: two threads that write at the same time free the same memory twice, and the rank dies
then or later. torch 2.11, 2.13 and 2.15 do (`docs/adr/0013-gloo.md` has the lines that show it). Collectives that
overlap are what fxshard makes. torch passes no options to its gloo, so a backend of another name makes it with one
thread: `torch.distributed.init_process_group("fxshard_gloo")`, or "cpu:fxshard_gloo,cuda:nccl". It is also faster, for
two threads fight over the same connections.

That thread also gives back the tensors of a collective, after it has told who waits that it is done, and needs Python's
lock for it. Where the process ends in between, Python ends the thread inside of a C++ destructor, and the rank dies of
"terminate called without an active exception", which fails the whole job after its last step (2 of 113 runs of an
example on a busy machine). A mesh keeps the group, and so the thread, alive beyond `destroy_process_group()`, so the
process waits at its end until the thread has nothing left to do.

[Note: reductions on gloo]
torch's gloo does a reduce_scatter as an all_reduce of everything and a copy of one part. Units of two ranks reduce on
an `ExchangeGroup` instead: each rank sends the other one its part, and adds what it has received on the thread that
waits. That moves half of the bytes, and the sum of two has the bits of gloo's own. More ranks would round otherwise
than FSDP2, which adds along gloo's ring; they stay with it.
"""
# ruff: noqa: D102 (methods of torch's ProcessGroup and Work)

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Work

from fxshard import torch_private
from fxshard.errors import InvariantError
from fxshard.ir.plan import EXCHANGING
from fxshard.options import gloo_interfaces
from fxshard.runtime import mesh_axes
from fxshard.runtime.comm_group import PythonGroup
from fxshard.runtime.raw import as_bytes

BACKEND = "fxshard_gloo"

_THREAD = "pt_gloo_runloop"
"""What torch calls the thread; Linux shows it."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Make the backend known to torch; once is enough."""
    if dist.is_available() and dist.is_gloo_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])


def warn_of_two_threads(mesh: DeviceMesh) -> None:
    """Say once what may happen, where the collectives of a mesh run on torch's own gloo."""
    group = mesh_axes.shard_group(mesh)
    is_real = isinstance(group, dist.ProcessGroup)  # `explain` has stand-ins
    if mesh.device_type != "cpu" or mesh.size() == 1 or not is_real:
        return
    if has_two_threads(group):
        _say_once()


def has_two_threads(group: dist.ProcessGroup) -> bool:
    """Whether collectives of CPU tensors that overlap may corrupt memory: torch's own gloo has them."""
    return backend_of(group, "cpu") == "gloo"


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """Name of the backend that serves tensors of such a device, empty if none does."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part)
    return backends.get(device_type, "")


# ---- reductions


class ExchangeGroup(PythonGroup):
    """The reductions of two ranks on `fxshard_gloo`: an all_to_all and a sum; see [Note: reductions on gloo]."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(BACKEND, f"{name}{EXCHANGING}", rank, 2)
        self._behind = name

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Work:
        op = opts.reduceOp.op
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise InvariantError(f"units on gloo reduce to a sum or an average, and a graph asks for {op}.")
        behind = torch_private.backend_for(torch_private.process_group_of(self._behind), "cpu")
        received = [torch.empty((2, *output.shape), dtype=output.dtype) for output in outputs]
        pairs = zip(map(as_bytes, received), map(as_bytes, inputs), strict=True)
        works = [behind.alltoall_base(parts, sent, [], []) for parts, sent in pairs]
        return _Exchange(works, outputs, received, is_average=op == dist.ReduceOp.AVG)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    """What torch 2.11 to 2.13 call them."""


class _Exchange(Work):
    """All_to_alls under way, whose parts, `[2, *output.shape]`, are added by the thread that waits."""

    def __init__(
        self, works: Sequence[Work], outputs: Sequence[Tensor], received: Sequence[Tensor], *, is_average: bool
    ) -> None:
        super().__init__()
        self._works, self._is_average = works, is_average
        self._parts = list(zip(received, outputs, strict=True))

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        parts, self._works, self._parts = self._parts, [], []
        with torch.no_grad():
            for (first, second), output in parts:
                torch.add(first, second, out=output)
                if self._is_average:
                    output.div_(2)
        return True


@functools.cache
def _exchange_group(name: str, rank: int) -> ExchangeGroup:
    return ExchangeGroup(name, rank)


def reducing(group: dist.ProcessGroup | None, device_type: str = "cpu") -> str:
    """Return the name of the group on which `group`'s ranks reduce tensors of a device; empty if that is itself."""
    if not isinstance(group, dist.ProcessGroup) or device_type != "cpu":  # `explain` has stand-ins
        return ""
    if group.size() != 2 or backend_of(group, "cpu") != BACKEND:
        return ""
    return str(_exchange_group(group.group_name, group.rank()).group_name)


@functools.cache
def _say_once() -> None:
    _log.warning(
        "fxshard: torch's gloo corrupts memory once in many thousand collectives that overlap, and the rank dies. Use "
        'torch.distributed.init_process_group("%s"), which is the same with one thread (docs/adr/0013-gloo.md).',
        BACKEND,
    )


def disconnect(group_names: Iterable[str]) -> bool:
    """Shut down this rank's connections of some groups, so that all waits on them fail; whether there were any."""
    done = False
    known = _connections()
    for fd, inode in itertools.chain.from_iterable(known.get(name, ()) for name in group_names):
        with suppress(OSError):  # the group was destroyed meanwhile
            if os.stat(fd).st_ino == inode:
                with socket.socket(fileno=os.dup(fd)) as connection:
                    connection.getpeername()  # one that listens has none
                    connection.shutdown(socket.SHUT_RDWR)
                    done = True
    return done


@functools.cache
def _connections() -> dict[str, set[tuple[int, int]]]:
    return {}


def _sockets() -> set[tuple[int, int]]:
    found = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile
            status = entry.stat()
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(entry.name), status.st_ino))
    return found


def _make(given: Any, _: object) -> Any:
    _settle_at_exit()
    if given.group_size == 2:  # made anew after `destroy_process_group()`, which forgets all names
        made = _exchange_group(given.group_id, given.group_rank)
        torch_private.register_group(made.group_name, made)
    before = _sockets()
    backend = torch_private.gloo_of_one_thread(given, gloo_interfaces())  # which torch's own gloo heeds, too
    _connections()[given.group_id] = _sockets() - before
    return backend


@functools.cache
def _settle_at_exit() -> None:
    atexit.register(_settle)


def _settle(seconds: float = 1.0) -> None:
    """Let gloo's threads give back what they hold, while they can still have Python's lock; see [Note: gloo]."""
    end = time.monotonic() + seconds
    time.sleep(0.001)  # others may have the lock meanwhile
    while any(_is_busy(thread) for thread in _threads()) and time.monotonic() < end:
        time.sleep(0.001)


def _threads() -> Iterator[Path]:
    for thread in Path("/proc/self/task").glob("*"):
        try:
            if (thread / "comm").read_text().strip() == _THREAD:
                yield thread
        except OSError:  # it has ended
            pass


def _is_busy(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] != "S"
    except OSError:
        return False
