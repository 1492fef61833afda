"""A dry run that computes: its fakes have shadows on the CPU, and what the device is given waits in queues.

[Note: shadows]
Each storage of a fake tensor has a shadow of as many bytes for each rank. All ranks run the same code, so one process
runs it once, on rank 0's fakes, and each item of a stream computes for all ranks.

A shadow is NaN where it was allocated (all bits are set). What was freed becomes NaN at the next allocation on the
stream that it belongs to, the first moment at which the allocator could hand it out, and goes to a new owner of the
same size; if it was recorded with streams, then as soon as these have run what they had been given, and to nobody. So
a wait that is missing gives NaN, or another number, in some order of the streams.

A CUDA graph is recorded in the first step, in a pool of memory of its own, and replayed in the second: what it was
given is copied to where it was recorded, but for its static inputs, and the same items run again.

Nothing is computed while Python runs. The items are kept, and each of many orders computes them from the beginning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fxshard.ir import ops
from tests.cross_cuda.clocks import Clock, MockStream, Streams, Work, _Storage
from tests.cross_cuda.dry_run import Call, DryRun
from tests.cross_cuda.numeric import interpreter
from tests.cross_cuda.numeric.exchanges import Collective, RankCall, groups_of
from tests.cross_cuda.numeric.executor import ALLOCATOR, POISON, Item
from tests.cross_cuda.numeric.kernels import KERNELS
from tests.cross_cuda.numeric.remembered import Launch


class Shadow(NamedTuple):
    """What stands for a storage."""

    number: int
    of_ranks: tuple[UntypedStorage, ...]

    def fill(self, byte: int = 255) -> None:
        """Make it NaN, whatever is in it."""
        for storage in self.of_ranks:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(byte)


@dataclass
class ComputingStreams(Streams):
    """Streams whose memory has shadows, and which keep what they were given; see [Note: shadows]."""

    ranks: Sequence[int] = (0, 1)
    items: list[Item] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory: list[Shadow] = []
        self._shadows: dict[int, Shadow] = {}
        self._to_hand_out: dict[tuple[str, str], list[tuple[Shadow, Clock | None]]] = {}  # by stream and pool
        self._idle: dict[tuple[str, str, int], list[Shadow]] = {}  # also by size

    def given(self, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Work | None) -> None:
        """Keep an item for later."""
        if work is not None:
            touched = [frozenset(self.shadow_of(tensor).number for tensor in tensors) for tensors in (reads, writes)]
            self._keep(self.current, op, work, *touched)

    def _keep(self, stream: MockStream, op: str, work: Work, *touched: frozenset[int]) -> None:
        self.items.append(Item(stream.name, stream.clock[stream.name], dict(stream.clock), op, work, *touched))

    def real(self, tensor: Tensor, index: int) -> Tensor:
        """Return a view of a fake tensor's shadow of the rank of that index, and of any other tensor itself."""
        if not isinstance(tensor, FakeTensor):
            return tensor.detach()
        shadow = self.shadow_of(tensor).of_ranks[index]
        layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        with _disable_current_modes(), torch.no_grad():
            return torch.empty(0, dtype=tensor.dtype).set_(shadow, *layout)

    def shadow_of(self, tensor: Tensor) -> Shadow:
        """Return what stands for a tensor's memory."""
        self._storage_of(tensor, "an op")
        return self._shadows[tensor.untyped_storage()._cdata]

    def _storage_of(self, tensor: Tensor, op: str) -> _Storage:
        memory = tensor.untyped_storage()
        is_new = memory._cdata not in self._storages
        found = super()._storage_of(tensor, op)
        if is_new:
            self._shadows[memory._cdata] = self._allocated(self.named(found.home), memory.nbytes())
        return found

    def _free(self, key: int) -> None:
        storage, shadow = self._storages[key], self._shadows.pop(key)
        super()._free(key)
        until: Clock | None = None
        for name in storage.recorded:
            clock = self.named(name).clock
            until = {one: max(clock.get(one, 0), (until or {}).get(one, 0)) for one in {*clock, *(until or {})}}
        if storage.home != self.host.name:
            self._to_hand_out.setdefault((storage.home, storage.pool), []).append((shadow, until))

    def _allocated(self, home: MockStream, num_bytes: int) -> Shadow:
        place = home.name, self.pool
        for shadow, until in self._to_hand_out.pop(place, []):
            poison = POISON, shadow.fill, frozenset[int](), frozenset([shadow.number])
            if until is None:
                self._keep(home, *poison)
                home.tick()  # no op, behind which a fault could be put
                self._idle.setdefault((*place, shadow.of_ranks[0].nbytes()), []).append(shadow)
            else:
                needs = {name: max(until.get(name, 0), home.clock.get(name, 0)) for name in {*until, *home.clock}}
                self.items.append(Item(ALLOCATOR, 0, needs, *poison))
        if idle := self._idle.get((*place, num_bytes)):
            return idle.pop()
        return self._made(num_bytes)

    def _made(self, num_bytes: int) -> Shadow:
        with _disable_current_modes():
            made = [torch.empty(num_bytes, dtype=torch.uint8).untyped_storage() for _ in self.ranks]
        self.memory.append(Shadow(len(self.memory), tuple(made)))
        return self.memory[-1]


class _Graph(NamedTuple):
    """A CUDA graph that was recorded."""

    inputs: list[Any]  # where it reads them
    outputs: list[Any]
    items: list[Item]


class ComputingRun(DryRun):
    """Notes what runs on mock streams, which keep it so that it can be computed in many orders."""

    streams: ComputingStreams

    def __init__(self, streams: ComputingStreams, launch: Launch = interpreter.launch) -> None:
        """`launch` runs kernels."""
        super().__init__(streams)
        self._launch_kernel = launch
        self._begin: list[Shadow] = []
        self._initial: list[tuple[Tensor, Tensor]] = []
        self._graphs: dict[int, _Graph] = {}

    def put(self, fake: Tensor, values: Sequence[Tensor]) -> None:
        """Give a fake tensor values on each rank, with which everything begins; what lies beside it becomes 0."""
        self._begin.append(self.streams.shadow_of(fake))
        for i, value in enumerate(values):
            self._initial.append((self.streams.real(fake, i), value))

    def get(self, fake: Tensor) -> list[Tensor]:
        """Return a view for each rank of what will be in a fake tensor."""
        return [self.streams.real(fake, i) for i in range(len(self.streams.ranks))]

    def begin(self) -> None:
        """Fill all memory with what it begins with."""
        for shadow in self.streams.memory:
            shadow.fill()
        for shadow in self._begin:
            shadow.fill(0)
        for target, values in self._initial:
            target.copy_(values)

    def graphed(self, model: Callable[[list[Any]], Any], inputs: list[Any], static: Sequence[int]) -> Any:
        """Record a CUDA graph, or replay it."""
        graph = self._graphs.get(id(model))
        if graph is None:
            self.streams.pool = f"graph {len(self._graphs)}"
            own = [one.clone() if _is_on_device(one) and i not in static else one for i, one in enumerate(inputs)]
            start = len(self.streams.items)
            graph = _Graph(own, model([*own]), self.streams.items[start:])
            self.streams.pool, self._graphs[id(model)] = "", graph
        else:
            for i, (one, given) in enumerate(zip(graph.inputs, inputs, strict=True)):
                if _is_on_device(one) and i not in static and not self.streams.forgets("copy"):
                    one.copy_(given)
            reads, writes = ([one for one in some if _is_on_device(one)] for some in (graph.inputs, graph.outputs))
            self.streams.run("graph", reads, writes, functools.partial(_replay, graph.items))
        inputs.clear()
        return [one.detach() if _is_on_device(one) else one for one in graph.outputs]

    def work_of(self, call: Call) -> Work:
        """Return what computes a call on the shadows of all ranks."""
        op, ranks = call.function, self.streams.ranks
        args = [self._on_the_cpu(call.args, call.kwargs, i) for i in range(len(ranks))]
        if not isinstance(op, torch._ops.OpOverload):
            return functools.partial(_launch_on_all, self._launch_kernel, op, [given for given, _ in args])
        leaves = tree_leaves((call.args, call.kwargs))
        given = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}
        made = [(i, leaf) for i, leaf in enumerate(tree_leaves(call.results)) if isinstance(leaf, Tensor)]
        made = [(i, leaf) for i, leaf in made if leaf.untyped_storage()._cdata not in given]
        targets = [[(i, self.streams.real(leaf, index)) for i, leaf in made] for index in range(len(ranks))]
        names = [argument.name for argument in op._schema.arguments]
        if "group_name" not in names:
            is_on_device = any(leaf.is_cuda for leaf in leaves if isinstance(leaf, Tensor))
            function = KERNELS.get(op.name(), op) if is_on_device else op
            return functools.partial(_run_on_all, function, args, targets)
        named = [dict(zip(names, given, strict=False)) | others for given, others in args]
        groups = groups_of(named[0]["group_name"], ranks)
        if op is ops.KEEP_ROWS:  # it would look for its rank when it is computed
            places = [group.index(rank) for group, rank in zip(groups, ranks, strict=True)]
            args = [((one["parameters"], one["num_ranks"], i), {}) for one, i in zip(named, places, strict=True)]
            return functools.partial(_run_on_all, ops.rows_kept, args, targets)
        calls = zip(ranks, groups, named, targets, strict=True)
        return Collective([RankCall(op, *call) for call in calls])

    def _on_the_cpu(self, args: Any, kwargs: Any, index: int) -> tuple[Any, dict[str, Any]]:
        args, kwargs = tree_map_only(Tensor, lambda tensor: self.streams.real(tensor, index), (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        return args, {name: value for name, value in kwargs.items() if name not in ("pin_memory", "non_blocking")}


def _replay(items: Sequence[Item]) -> None:
    for item in items:
        item.work()


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _launch_on_all(launch: Launch, kernel: Any, args: Sequence[Sequence[Any]]) -> None:
    for given in args:
        launch(kernel, given)


def _run_on_all(
    function: Callable[..., Any],
    args: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    targets: Sequence[Sequence[tuple[int, Tensor]]],
) -> None:
    for (given, named), wanted in zip(args, targets, strict=True):
        leaves = tree_leaves(function(*given, **named))
        for i, target in wanted:
            if leaves[i] is not None:
                target.copy_(leaves[i])
