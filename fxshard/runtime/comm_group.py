"""Collectives that an object of the user's does: FSDP2's `set_custom_all_gather` and `set_custom_reduce_scatter`.

[Note: objects that communicate]
A unit with such an object launches on a process group of its own, a `CommGroup`, whose collectives are calls of the
object with the ranks of the group behind it. So a launch stays the node that it is: passes place it, the verifier
follows it, a graph or the prefetcher launches it, `wait_tensor` waits for it, and code knows of the object nothing but
the name of the group. That name has the type of the object in it, so ranks compare it, and code that was cached is
found again by who sets an object of that type.

The object gets what it gets in FSDP2: one call for each direction and dtype of a unit, the whole unit (`bucket` and the
choice of tensors leave such launches alone), a flat buffer of its own `allocate` as input and another one as output,
for an all_gather the one inside of the other, and `async_op=False`. So one that is written for FSDP2 may finish its
work behind a collective, and one that keeps its buffers may do that. Its buffers are read until the wait, and no
longer; that costs one more copy of what is sent or received, on its stream.

- On CUDA it runs on a stream of its own, which the current one waits for where the graph waits.
- On the CPU it runs where the graph launches. A `Work` that it returns is waited for where the graph waits, or before
  one of its buffers is used again.
"""
# ruff: noqa: D102 (most methods are those of torch's ProcessGroup)

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.ir.plan import BY

_ProcessGroup: Any = dist.ProcessGroup  # its stubs ask for every overload of a method; torch calls one


class PythonGroup(_ProcessGroup):  # type: ignore[misc] # see above
    """A process group whose collectives are methods of a subclass."""

    def __init__(self, backend: str, name: str, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self._backend, self._name, self._rank, self._ranks = backend, name, rank, ranks

    def getBackendName(self) -> str:
        return self._backend

    def getGroupName(self) -> str:
        return self._name

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._ranks

    rank, size, name = getRank, getSize, getBackendName
    group_name = property(getGroupName)


class CommGroup(PythonGroup):
    """A group whose all_gathers and reduce_scatters are calls of `comm`; see [Note: objects that communicate]."""

    def __init__(self, behind: dist.ProcessGroup, comm: Any, name: str) -> None:
        super().__init__("fxshard_comm", name, behind.rank(), behind.size())
        self.comm, self.behind = comm, weakref.ref(behind)
        same = [each for known in _groups().values() for each in known if each.comm is comm]
        self.turns: _Turns = same[0].turns if same else _Turns()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Gather all in one call."""
        numels = [tensor.numel() for tensor in inputs]

        def call() -> _ObjectCall:
            number = sum(numels)
            buffer = self._allocate(number * self._ranks, inputs[0])
            own = buffer.narrow(0, self._rank * number, number)
            for part, tensor in zip(own.split(numels), inputs, strict=True):
                part.copy_(tensor.view(-1))
            return _ObjectCall(buffer, own, self._call(output_tensor=buffer, input_tensor=own, async_op=False))

        return self._launch(call, inputs, outputs, rows=self._ranks)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Reduce all in one call."""
        numels = [tensor.numel() for tensor in outputs]

        def call() -> _ObjectCall:
            sent = self._allocate(sum(numels) * self._ranks, inputs[0])
            for part, tensor in zip(sent.view(self._ranks, -1).split(numels, 1), inputs, strict=True):
                part.copy_(tensor.view(self._ranks, -1))
            buffer = self._allocate(sum(numels), inputs[0])
            return _ObjectCall(buffer, sent, self._call(output_tensor=buffer, input_tensor=sent, op=opts.reduceOp.op))

        return self._launch(call, inputs, outputs, rows=1)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    """What torch 2.11 to 2.13 call them."""

    def _launch(
        self, call: Callable[[], _ObjectCall], inputs: Sequence[Tensor], outputs: Sequence[Tensor], rows: int
    ) -> Work:
        """Let the object start; what it makes is copied into `outputs`, each a block of columns of `rows` rows."""
        with torch.no_grad(), self._on_own_stream(outputs[0].device) as stream:
            made = _Communication(self.turns, call(), inputs, outputs, rows)
            if stream is not None or made.is_done:
                made.finish()
            if stream is not None:
                made.joins = stream.record_event()
        return made

    @contextmanager
    def _on_own_stream(self, device: torch.device) -> Iterator[torch.cuda.Stream | None]:
        """Run on the object's stream after what the current one has been given so far; the CPU has none."""
        if device.type != "cuda":
            yield None
            return
        self.turns.stream = stream = self.turns.stream or torch.cuda.Stream(device, priority=-1)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield stream

    def _allocate(self, numel: int, like: Tensor) -> Tensor:
        """Return a buffer of the object's, which nothing reads any more."""
        with torch.inference_mode(False):
            made: Tensor = self.comm.allocate((numel,), dtype=like.dtype, device=like.device)
        found = (made.dtype, made.device, made.numel()) if isinstance(made, Tensor) else type(made).__name__
        if found != (like.dtype, like.device, numel) or not made.is_contiguous():
            _refuse(self.comm, f"allocate(({numel},), dtype={like.dtype}, device={like.device}) gave {found}")
        for call in [call for call in self.turns.unfinished if call.has(made)]:
            call.finish()
        return made.detach().view(-1)

    def _call(self, **given: Any) -> Work | None:
        if (group := self.behind()) is None:
            _refuse(self.comm, f"the process group of {self._name!r} has been destroyed")
        work = self.comm(group=group, **given)
        if not isinstance(work, Work | None):
            _refuse(self.comm, f"its call returned a {type(work).__name__}, and neither a Work nor None")
        return work


@dataclass(eq=False)
class _Turns:
    """What is under way by one object, over all groups."""

    unfinished: list[_Communication] = field(default_factory=list)  # calls whose buffers are read at their wait
    stream: torch.cuda.Stream | None = None  # on which it runs


class _ObjectCall(NamedTuple):
    """What a call of an object has begun: the buffers, of the result and of what is sent, and its work."""

    buffer: Tensor
    sent: Tensor
    work: Work | None


class _Communication(Work):
    """One call of an object, and what it reads and writes until somebody has waited."""

    def __init__(
        self, turns: _Turns, begun: _ObjectCall, inputs: Sequence[Tensor], outputs: Sequence[Tensor], rows: int
    ) -> None:
        super().__init__()
        self._turns, self._rows = turns, rows
        self._begun: _ObjectCall | None = begun
        self._held: tuple[Sequence[Tensor], Sequence[Tensor]] | None = (outputs, inputs)
        self.joins: torch.Event | None = None
        turns.unfinished.append(self)

    @property
    def is_done(self) -> bool:
        """Whether the object was done when its call returned."""
        return self._begun is None or self._begun.work is None

    def has(self, memory: Tensor) -> bool:
        """Whether one of its buffers lies in the same memory."""
        buffers = self._begun[:2] if self._begun is not None else ()
        return torch_private.storage_id(memory) in map(torch_private.storage_id, buffers)

    def finish(self) -> None:
        """Wait for the object and copy what it has made; the buffers are its own again."""
        begun, self._begun = self._begun, None
        if begun is None or self._held is None:
            return
        self._turns.unfinished.remove(self)
        if begun.work is not None:
            begun.work.wait()
        outputs, _ = self._held
        numels = [tensor.numel() // self._rows for tensor in outputs]
        for part, tensor in zip(begun.buffer.view(self._rows, -1).split(numels, 1), outputs, strict=True):
            tensor.view(self._rows, -1).copy_(part)

    def wait(self, timeout: Any = None) -> bool:
        with torch.no_grad():
            self.finish()
        if self.joins is not None and self._held is not None:
            torch.cuda.current_stream(self._held[0][0].device).wait_event(self.joins)
        self._held = None
        return True


@functools.cache
def _groups() -> weakref.WeakKeyDictionary[dist.ProcessGroup, list[CommGroup]]:
    return weakref.WeakKeyDictionary()


def name_of(group: dist.ProcessGroup | None, comm: Any) -> str:
    """Return the name of the group on which `comm` does the collectives of `group`'s ranks; empty without one."""
    if comm is None or group is None:
        return ""
    name = f"{group.group_name}{BY}{type(comm).__module__}.{type(comm).__qualname__}"
    if not isinstance(group, dist.ProcessGroup):
        return name  # `explain` has stand-ins
    known = _groups().setdefault(group, [])
    if found := [each.group_name for each in known if each.comm is comm]:
        return str(found[0])
    alike = sum(type(each.comm) is type(comm) for each in known)
    made = CommGroup(group, comm, f"{name} {alike + 1}" if alike else name)
    torch_private.register_group(made.group_name, made)
    known.append(made)
    return str(made.group_name)


def _refuse(comm: object, why: str) -> NoReturn:
    raise ConfigError(f"{type(comm).__name__}, which does collectives of a unit, is not as FSDP2 wants it: {why}.")
