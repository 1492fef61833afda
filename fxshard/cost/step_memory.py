"""What a step holds at its worst moment, by category, over graphs that run in a row and call each other.

Tensors are made and freed as [Note: liveness] has it: every op's result counts, but not what a fused kernel makes for
itself alone. What forward keeps for backward is held from the one to the other; gradients from the graph on that
reduces them. What nothing here sees (workspaces, the device's context) is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from fxshard.cost.allocator import CachingAllocator, MemoryBlock
from fxshard.cost.fusion import is_fused
from fxshard.cost.sizes import Sizes
from fxshard.ir import collectives, ops, signature, tags
from fxshard.ir.collectives import ALL_REDUCES, GATHERS, REDUCTIONS
from fxshard.ir.liveness import unsharded_storages

Bytes = dict[str, int]
"""Category -> bytes."""

MAIN, GATHERING, REDUCING = "main", "gathering", "reducing"
"""Streams with memory pools of their own. All is in the main one's, unless gathers and reductions have streams."""


class GraphMemory:
    """The storages of one graph, and what they are.

    Attributes:
        made: node -> the storages that it makes; those of the caller are in none.
        freed: node -> the storages that are freed behind it.
        saved: for a forward the storages that it keeps for backward, for a backward those that it gets, in one order;
            -1 where it is the caller's.
        kept_inputs: bytes of the caller's inputs that a forward keeps for backward, other than shards.
        late_bytes: that a reduction sends whose wait is left to a later graph.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        is_backward: bool,
        fuses: bool,
        resident: bool = False,
        results: int = 0,
        differentiable: Collection[str] = (),
    ) -> None:
        """Sort the storages; those of `resident` parameters are there throughout the step, and count elsewhere.

        Of a forward, `results` is the number of its own results, which its caller makes, and `differentiable` are the
        names of inputs that get a gradient.
        """
        live = self.live = sizes.live
        self.nodes = live.nodes
        outputs = [each if isinstance(each, fx.Node) else None for each in signature.results_of(live.nodes[0].graph)]
        inputs = [node for node in live.nodes if node.op == "placeholder"]
        self.reduced = {n for n in outputs if n is not None and _is_reduced(n)} if is_backward else set()
        shared = [n for n in outputs if n not in self.reduced] if is_backward else outputs[:results]
        theirs = {i for node in (*inputs, *shared) if node is not None for i in live.storages_of[node]}
        handed = inputs if is_backward else outputs[results:]
        saved = [n for n in handed if n is not None and not (is_backward and n.name.startswith("tangents_"))]
        first = [next(iter(live.storages_of[node]), -1) for node in saved]
        self.saved = tuple(-1 if i in theirs and not is_backward else i for i in first)
        self.nbytes = [int(sizes.point.value(size)) for size in sizes.of_storage]
        kept = {i for node in inputs if node.name in differentiable for i in live.storages_of[node]} & set(first)
        self.kept_inputs = sum(self.nbytes[i] for i in kept)
        if fuses:
            self._leave_out_fused()
        self.category = self._categories()
        for i, storage in enumerate(live.storages):
            if storage.maker.target is ops.COPY_TO_HOST or (resident and self.category[i] == "unsharded"):
                self.nbytes[i] = 0
        self.made: dict[fx.Node, list[int]] = {}
        self.freed: dict[fx.Node, list[int]] = {}
        for i, storage in enumerate(live.storages):
            if i not in theirs:
                self.made.setdefault(live.nodes[storage.birth], []).append(i)
            if i not in theirs or (is_backward and i in self.saved):
                self.freed.setdefault(live.nodes[storage.last_use], []).append(i)
        self.late_bytes = self._late()

    def _categories(self) -> list[str]:
        live = self.live
        unsharded, reducing = unsharded_storages(live), (*REDUCTIONS, *ALL_REDUCES)
        gradients = {i for node in self.reduced for i in live.storages_of[node]}
        parts = [part for n in live.nodes if n.target in reducing for part in (n, *n.all_input_nodes)]
        sent = {i for part in parts for i in live.storages_of[part]}
        names = (("gradients", gradients), ("unsharded", unsharded), ("in flight", sent))
        return [next((name for name, of in names if i in of), "activations") for i in range(len(live.storages))]

    def _leave_out_fused(self) -> None:
        """Count nothing for what one fused op makes and fused ops alone read."""
        live = self.live
        readers: dict[int, list[fx.Node]] = {}
        for node in live.nodes:
            if node.op == "output" or live.allocates(node):
                for i in (i for source in node.all_input_nodes for i in live.storages_of[source]):
                    readers.setdefault(i, []).append(node)
        for i, storage in enumerate(live.storages):
            if is_fused(storage.maker) and all(map(is_fused, readers.get(i, ()))):
                self.nbytes[i] = 0

    def _late(self) -> int:
        if all(node.target is not ops.DEFERRED_WAIT for node in self.nodes):
            return 0
        sent = [node.all_input_nodes for node in self.nodes if node.target in REDUCTIONS]
        return max((sum(self.nbytes[i] for s in each for i in self.live.storages_of[s]) for each in sent), default=0)


def forward_memory(sizes: Sizes, backward: fx.Graph, *, fuses: bool, resident: bool = False) -> GraphMemory:
    """Sort the storages of a forward whose backward that is."""
    graph = sizes.live.nodes[0].graph
    saved = [node for node in backward.find_nodes(op="placeholder") if not node.name.startswith("tangents_")]
    gradients = enumerate(signature.results_of(backward))
    shards = {node.name for node in graph.find_nodes(op="placeholder") if tags.meta_of(node).shard is not None}
    return GraphMemory(
        sizes,
        is_backward=False,
        fuses=fuses,
        resident=resident,
        results=len(signature.results_of(graph)) - len(saved),
        differentiable={f"primals_{i + 1}" for i, each in gradients if each is not None} - shards,
    )


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The graphs of a frame, and the frames that run in the place of some of their nodes."""

    forward: GraphMemory
    backward: GraphMemory
    forward_calls: Mapping[fx.Node, StepMemory]
    backward_calls: Mapping[fx.Node, StepMemory]


class MemoryChange(NamedTuple):
    """A tensor that is made or freed in a step."""

    run: int  # counted as `Clock.runs`; -1 once the step is over
    place: int  # of the node in that graph before which it happens
    is_called: bool  # whether that node stands for a graph, and it happens before this runs
    category: str
    nbytes: int  # below zero where it is freed


class MemoryUse(NamedTuple):
    """What a step takes."""

    held: Bytes  # at the worst moment
    reserved: int  # bytes that the caching allocator has in the end, [Note: reserved memory]
    standing: Bytes  # when a step begins
    changes: Sequence[MemoryChange]  # from there on, in the second step
    places: Sequence[int]  # the most of the first step: until each call of a frame, in each, behind the last one


def memory_of_step(
    outer: StepMemory,
    standing: Mapping[str, int],
    *,
    gradients: int = 0,
    own_streams: bool = False,
    stepping: int = 0,
) -> MemoryUse:
    """Run two steps on an allocator, the first of which finds it empty.

    Args:
        outer: the step.
        standing: category -> bytes that are there throughout: parameters and optimizer state.
        gradients: bytes of them that are held from the beginning, as with several microbatches.
        own_streams: whether gathers and reductions have streams of their own, and parameters are copied out of what was
            gathered.
        stepping: bytes that the step of the optimizer takes besides.
    """
    walk = _Walk(standing, own_streams, accumulates=gradients > 0, stepping=stepping)
    if gradients:
        walk.make("gradients", gradients)
    walk.step(outer)
    walk.changes, standing, places = [], dict(walk.held), walk.places
    walk.step(outer)
    reserved = sum(each.reserved for each in walk.allocators.values())
    return MemoryUse(walk.worst, reserved, standing, walk.changes, places)


class FrameMemory(NamedTuple):
    """Bytes that a frame adds to what is there."""

    forward: int  # the most, while its forward runs
    kept: int  # from then on
    backward: int  # the most, while its backward runs
    left: int  # from then on, until the step ends


def memory_of_frame(frame: StepMemory, late: int, *, own_streams: bool, accumulates: bool) -> FrameMemory:
    """Run one frame alone.

    Args:
        frame: it.
        late: bytes that a reduction of the graph before its backward still has.
        own_streams: as of `memory_of_step`.
        accumulates: whether a reduced gradient is added to one that is there.
    """
    walk = _Walk({}, own_streams, accumulates)
    result = walk.forward(frame)
    forward, kept = walk.most, walk.total
    walk.late = [walk.make("in flight", late)] if late else []
    walk.places = [walk.total]
    walk.backward(frame, result)
    return FrameMemory(forward, kept, walk.places[0], walk.total - frame.backward.late_bytes)


class _MadeTensor(NamedTuple):
    """A tensor of the walk."""

    block: MemoryBlock
    category: str
    nbytes: int
    stream: str


class _Kept(NamedTuple):
    """What a forward keeps for its backward: as `GraphMemory.saved`, of its caller's inputs, and of the calls in it."""

    saved: list[_MadeTensor | None]
    inputs: list[_MadeTensor]
    calls: list[_Kept]


@dataclass
class _Walk:
    standing: Mapping[str, int]
    own_streams: bool
    accumulates: bool  # whether a reduced gradient is added to one that is there
    stepping: int = 0  # bytes that the step of the optimizer takes besides
    held: Bytes = field(default_factory=dict)
    worst: Bytes = field(default_factory=dict)
    total: int = 0
    most: int = 0
    gradients: list[_MadeTensor] = field(default_factory=list)
    late: list[_MadeTensor] = field(default_factory=list)
    changes: list[MemoryChange] = field(default_factory=list)
    runs: int = 0  # that have begun in this step
    at: tuple[int, int, bool] = (0, 0, False)
    places: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        self.allocators = {name: CachingAllocator() for name in (MAIN, GATHERING, REDUCING)}
        for name, nbytes in self.standing.items():
            self.make(name, nbytes)

    def make(self, category: str, nbytes: int, stream: str = MAIN) -> _MadeTensor:
        """Allocate a tensor."""
        if self.own_streams and category == "gradients":
            stream = REDUCING
        self.held[category] = self.held.get(category, 0) + nbytes
        self.total += nbytes
        self.places[-1] = max(self.places[-1], self.total)
        self.changes.append(MemoryChange(*self.at, category, nbytes))
        if self.total > self.most:
            self.most, self.worst = self.total, dict(self.held)
        stream = stream if self.own_streams else MAIN
        return _MadeTensor(self.allocators[stream].allocate(nbytes), category, nbytes, stream)

    def free(self, tensor: _MadeTensor) -> None:
        """Free one."""
        self.held[tensor.category] -= tensor.nbytes
        self.total -= tensor.nbytes
        self.changes.append(MemoryChange(*self.at, tensor.category, -tensor.nbytes))
        self.allocators[tensor.stream].release(tensor.block)

    def step(self, outer: StepMemory) -> None:
        """Run a forward and a backward, and forget the gradients."""
        self.places, self.runs = [self.total], 0
        kept = self.forward(outer)
        self.places.append(self.total)
        self.backward(outer, kept)
        self._free_all(self.late)
        self.at = (-1, 0, False)
        self._free_all([self.make("optimizer", self.stepping)] if self.stepping else [])
        self._free_all(self.gradients)

    def forward(self, step: StepMemory) -> _Kept:
        """Run a forward."""
        graph, calls, there = step.forward, list[_Kept](), dict[int, _MadeTensor]()
        kept, run = set(graph.saved), self._enter()
        for place, node in enumerate(graph.nodes):
            self.at = (run, place, node in step.forward_calls)
            self._begin(graph, node, there)
            if node in step.forward_calls:
                self.places.append(self.total)
                calls.append(self.forward(step.forward_calls[node]))
                self.places.append(self.total)
            self.at = (run, place + 1, False)
            for i in graph.freed.get(node, ()):
                if i not in kept:
                    self.free(there.pop(i))
        inputs = [self.make("activations", graph.kept_inputs)] if graph.kept_inputs else []
        return _Kept([there.get(i) for i in graph.saved], inputs, calls)

    def backward(self, step: StepMemory, kept: _Kept) -> None:
        """Run a backward on what `forward` returned."""
        graph = step.backward
        alone = {id(held): (i, held) for i, held in zip(graph.saved, kept.saved, strict=True) if held is not None}
        there = dict(alone.values())  # a tensor that forward returns twice is freed once
        late, self.late, run = self.late, [], self._enter()
        for place, node in enumerate(graph.nodes):
            self.at = (run, place, node in step.backward_calls)
            self._begin(graph, node, there)
            if node in step.backward_calls:
                self.places.append(self.total)
                self.backward(step.backward_calls[node], kept.calls.pop())
                self.places.append(self.total)
            self.at = (run, place + 1, False)
            for tensor in (there.pop(i) for i in graph.freed.get(node, ()) if i in there):
                keeps = tensor.category == "gradients" and not self.accumulates
                self.gradients.append(tensor) if keeps else self.free(tensor)
            if late and collectives.is_launch(node):
                self._free_all(late)
        self._free_all([*late, *kept.inputs, *there.values()])
        if graph.late_bytes:
            self.late.append(self.make("in flight", graph.late_bytes))

    def _enter(self) -> int:
        self.runs += 1
        return self.runs - 1

    def _begin(self, graph: GraphMemory, node: fx.Node, there: dict[int, _MadeTensor]) -> None:
        buffer = None
        if self.own_streams and node.target in GATHERS:
            buffer = self.make("in flight", sum(graph.nbytes[i] for i in graph.live.storages_of[node]), GATHERING)
        for i in graph.made.get(node, ()):
            there[i] = self.make(graph.category[i], graph.nbytes[i])
        if buffer is not None:
            self.free(buffer)

    def _free_all(self, tensors: list[_MadeTensor]) -> None:
        while tensors:
            self.free(tensors.pop())


def _is_reduced(node: fx.Node) -> bool:
    """Whether a result of backward is a reduced gradient."""
    seen = [node]
    for _ in range(6):
        if any(each.target in (*REDUCTIONS, *ALL_REDUCES) for each in seen):
            return True
        seen = [source for each in seen for source in each.all_input_nodes]
    return False
