"""What a step holds at its worst moment, by category, over graphs that run in a row and call each other.

Tensors are made and freed as [Note: liveness] has it: every op's result counts, but not what a fused kernel makes for
itself alone. What forward keeps for backward is held from the one to the other; gradients from the graph on that
reduces them. What nothing here sees (workspaces, the device's context) is left out.

[Note: how long parameters are held]
Graphs free a parameter behind its last use. Code that runs uncompiled gathers a unit as a whole, and holds it until the
call ends; what autograd has saved of it lives on. FSDP2 holds a unit until its module's forward or backward ends, or,
if it does not reshard after forward, from forward on until the end of backward. What a graph gathers of its first unit
is held from when the graph before launches it (`GraphOfStep.ahead`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from fxshard.cost.allocator import CachingAllocator, MemoryBlock
from fxshard.cost.fusion import is_fused
from fxshard.cost.sizes import Sizes
from fxshard.cost.step import GraphOfStep
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
        buffers: gather -> bytes that it brings, where parameters are copied out of these.
        outliving: parameters that a forward does not free, although nothing saves them.
    """

    def __init__(
        self,
        sizes: Sizes,
        runs: GraphOfStep,
        *,
        is_backward: bool,
        fuses: bool,
        holds: bool = False,
        keeps: bool = False,
        results: int = 0,
        differentiable: Collection[str] = (),
    ) -> None:
        """Sort the storages; those of resident parameters are there throughout the step, and count elsewhere.

        With `holds` parameters are there until the graph ends, with `keeps` until its backward does: see
        [Note: how long parameters are held]. Of a forward, `results` is the number of its own results, which its caller
        makes, and `differentiable` are the names of inputs that get a gradient.
        """
        self.runs, self.live, self.nodes = runs, sizes.live, sizes.live.nodes
        live = self.live
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
            if storage.maker.target is ops.COPY_TO_HOST or (runs.resident and self.category[i] == "unsharded"):
                self.nbytes[i] = 0
        self.made: dict[fx.Node, list[int]] = {}
        self.freed: dict[fx.Node, list[int]] = {}
        copied_at = {launch: wait for wait, launch in runs.copies.items()}
        self.buffers = {each: sum(self.nbytes[i] for i in live.storages_of[each]) for each in copied_at}
        parameters = {i for node in live.nodes if tags.meta_of(node).param for i in live.storages_of[node]}
        self._place(copied_at, theirs, is_backward, parameters if holds else set())
        self.outliving = parameters if keeps and not is_backward else set()
        self.late_bytes = self._late()

    def _place(
        self, copied_at: Mapping[fx.Node, fx.Node], theirs: Collection[int], is_backward: bool, held: Collection[int]
    ) -> None:
        """Fill in `made` and `freed`; what is `held` is freed behind the last node."""
        for i, storage in enumerate(self.live.storages):
            born = self.nodes[storage.birth]
            if i not in theirs:
                self.made.setdefault(copied_at.get(born, born), []).append(i)
            if i not in theirs or (is_backward and i in self.saved):
                self.freed.setdefault(self.nodes[-1 if i in held else storage.last_use], []).append(i)

    def _categories(self) -> list[str]:
        live = self.live
        unsharded, reducing = unsharded_storages(live), (*REDUCTIONS, *ALL_REDUCES)
        gradients = {i for node in self.reduced for i in live.storages_of[node]}
        parts = [part for n in live.nodes if n.target in reducing for part in (n, *n.all_input_nodes)]
        sent = {i for part in parts for i in live.storages_of[part]}
        names = (("gradients", gradients), ("unsharded", unsharded), ("in flight", sent))
        return [next((name for name, of in names if i in of), "activations") for i in range(len(live.storages))]

    def launcher(self, calls: bool) -> fx.Node:
        """Return the node behind which the graph launches for the one that follows.

        It is that of the last launch; with FSDP2 that of the copy out of it. Without any it is the first node if other
        graphs are called in this one, else the last one: then nothing is launched.
        """
        if self.runs.last is None:
            return self.nodes[0 if calls else -1]
        return next((wait for wait, launch in self.runs.copies.items() if launch is self.runs.last), self.runs.last)

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


def forward_memory(sizes: Sizes, runs: GraphOfStep, backward: fx.Graph, **how: bool) -> GraphMemory:
    """Sort the storages of a forward whose backward that is; `how` as of `GraphMemory`."""
    graph = sizes.live.nodes[0].graph
    saved = [node for node in backward.find_nodes(op="placeholder") if not node.name.startswith("tangents_")]
    gradients = enumerate(signature.results_of(backward))
    shards = {node.name for node in graph.find_nodes(op="placeholder") if tags.meta_of(node).shard is not None}
    return GraphMemory(
        sizes,
        runs,
        is_backward=False,
        **how,
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


class CallPlaces(NamedTuple):
    """Where the call of a frame stands among the places of a step."""

    ahead: int  # the first place in which its first launch is under way
    begins: int  # until the last launch of it
    launches: int  # from then on
    ends: int  # behind it


class MemoryUse(NamedTuple):
    """What a step takes."""

    held: Bytes  # at the worst moment
    reserved: int  # bytes that the caching allocator has in the end, [Note: reserved memory]
    standing: Bytes  # when a step begins
    changes: Sequence[MemoryChange]  # from there on, in the second step
    places: Sequence[int]  # the most of the first step: until each call of a frame, in each, behind the last one
    calls: Sequence[CallPlaces]  # of forward, then of backward
    gathered: int  # the most that what all_gathers brought takes at once


def memory_of_step(
    outer: StepMemory,
    standing: Mapping[str, int],
    *,
    gradients: int = 0,
    own_streams: bool = False,
    stepping: int = 0,
) -> MemoryUse:
    """Run two steps on an allocator, the first of which finds it empty.

    `standing` maps category -> bytes that are there throughout: parameters, optimizer state, buffers. So many bytes of
    `gradients` are held from the beginning, as with several microbatches. With `own_streams` gathers and reductions
    have streams of their own, and parameters are copied out of what was gathered. The step of the optimizer takes
    `stepping` bytes besides.
    """
    walk = _Walk(standing, own_streams, accumulates=gradients > 0, stepping=stepping)
    if gradients:
        walk.make("gradients", gradients)
    walk.step(outer)
    walk.changes, standing, places, calls = [], dict(walk.held), walk.places, walk.calls
    walk.step(outer)
    reserved = sum(each.reserved for each in walk.allocators.values())
    return MemoryUse(walk.worst, reserved, standing, walk.changes, places, calls, walk.most_gathered)


class FrameMemory(NamedTuple):
    """Bytes that a graph of a frame adds to what is there."""

    ahead: int  # while the graph before it runs
    begins: int  # the most, until its last launch
    launches: int  # the most, from then on
    left: int  # behind it


def memory_of_frame(
    frame: StepMemory, late: int, *, own_streams: bool, accumulates: bool
) -> tuple[FrameMemory, FrameMemory]:
    """Run one frame alone: its forward, and its backward.

    A reduction of the graph before its backward still has `late` bytes; a reduced gradient is added to one that is
    there if it `accumulates`.
    """
    walk = _Walk({}, own_streams, accumulates)
    ahead = walk.launch_ahead(frame.forward)
    walk.places = [walk.total]
    result = walk.forward(frame)
    begins, launches = walk.places
    there = FrameMemory(ahead, begins, launches, walk.total)
    ahead = walk.launch_ahead(frame.backward)
    walk.late = [walk.make("in flight", late)] if late else []
    walk.places = [walk.total]
    walk.backward(frame, result)
    begins, launches = walk.places
    return there, FrameMemory(ahead, begins, launches, walk.total - frame.backward.late_bytes)


class _MadeTensor(NamedTuple):
    """A tensor of the walk."""

    block: MemoryBlock
    category: str
    nbytes: int
    stream: str
    gathered: int = 0  # bytes, if it is what an all_gather brought


_There = dict[int | fx.Node, _MadeTensor]
"""Storage, or gather of which it is the buffer -> the tensor."""


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
    gathered: int = 0  # bytes of what all_gathers brought
    most_gathered: int = 0
    gradients: list[_MadeTensor] = field(default_factory=list)
    late: list[_MadeTensor] = field(default_factory=list)
    changes: list[MemoryChange] = field(default_factory=list)
    runs: int = 0  # that have begun in this step
    at: tuple[int, int, bool] = (0, 0, False)
    places: list[int] = field(default_factory=lambda: [0])
    calls: list[CallPlaces] = field(default_factory=list)
    ahead: _There = field(default_factory=dict)  # of the graph that begins next
    ahead_since: int = 0  # its place

    def __post_init__(self) -> None:
        self.allocators = {name: CachingAllocator() for name in (MAIN, GATHERING, REDUCING)}
        for name, nbytes in self.standing.items():
            self.make(name, nbytes)

    def make(self, category: str, nbytes: int, stream: str = MAIN) -> _MadeTensor:
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
        self.held[tensor.category] -= tensor.nbytes
        self.total -= tensor.nbytes
        self.gathered -= tensor.gathered
        self.changes.append(MemoryChange(*self.at, tensor.category, -tensor.nbytes))
        self.allocators[tensor.stream].release(tensor.block)

    def step(self, outer: StepMemory) -> None:
        """Run a forward and a backward, and forget the gradients."""
        self.places, self.calls, self.runs = [self.total], [], 0
        kept = self.forward(outer)
        self.places.append(self.total)
        self.backward(outer, kept)
        self._free_all(self.late)
        self.at = (-1, 0, False)
        self._free_all([self.make("optimizer", self.stepping)] if self.stepping else [])
        self._free_all(self.gradients)

    def forward(self, step: StepMemory, following: GraphMemory | None = None) -> _Kept:
        """Run a forward; a graph that follows it has its first gathers launched."""
        graph, calls, outliving = step.forward, list[_Kept](), list[_MadeTensor]()
        kept, (run, there) = set(graph.saved), self._enter()
        called = [inner.forward for inner in step.forward_calls.values()]
        launcher = graph.launcher(bool(called))
        for place, node in enumerate(graph.nodes):
            self.at = (run, place, node in step.forward_calls)
            self._begin(graph, node, there)
            if node is launcher:
                self._hand_over(called[0] if called else following)
            if node in step.forward_calls:
                begins = self._enter_call(called.pop(0))
                calls.append(self.forward(step.forward_calls[node], called[0] if called else None))
                self._leave_call(*begins)
            self.at = (run, place + 1, False)
            for i in graph.freed.get(node, ()):
                if i in graph.outliving - kept:
                    outliving.append(there.pop(i))
                elif i not in kept:
                    self.free(there.pop(i))
        inputs = [self.make("activations", graph.kept_inputs)] if graph.kept_inputs else []
        return _Kept([there.get(i) for i in graph.saved], inputs + outliving, calls)

    def backward(self, step: StepMemory, kept: _Kept, following: GraphMemory | None = None) -> None:
        """Run a backward on what `forward` returned."""
        graph, (run, there) = step.backward, self._enter()
        alone = {id(held): (i, held) for i, held in zip(graph.saved, kept.saved, strict=True) if held is not None}
        there |= dict(alone.values())  # a tensor that forward returns twice is freed once
        late, self.late = self.late, []
        called = [inner.backward for inner in step.backward_calls.values()]
        launcher = graph.launcher(bool(called))
        for place, node in enumerate(graph.nodes):
            self.at = (run, place, node in step.backward_calls)
            self._begin(graph, node, there)
            if node is launcher:
                self._hand_over(called[0] if called else following)
            if node in step.backward_calls:
                begins = self._enter_call(called.pop(0))
                self.backward(step.backward_calls[node], kept.calls.pop(), called[0] if called else None)
                self._leave_call(*begins)
            self.at = (run, place + 1, False)
            for tensor in (there.pop(i) for i in graph.freed.get(node, ()) if i in there):
                keeps = tensor.category == "gradients" and not self.accumulates
                self.gradients.append(tensor) if keeps else self.free(tensor)
            if late and collectives.is_launch(node):
                self._free_all(late)
        self._free_all([*late, *kept.inputs, *there.values()])
        if graph.late_bytes:
            self.late.append(self.make("in flight", graph.late_bytes))

    def launch_ahead(self, graph: GraphMemory) -> int:
        """Launch what a graph begins with while the one before runs; return the bytes that this makes."""
        before = self.total
        for node in graph.runs.ahead:
            self._make(graph, node, self.ahead)
        return self.total - before

    def _enter(self) -> tuple[int, _There]:
        """Begin a graph: return its number, and what was launched for it."""
        self.runs += 1
        there, self.ahead = self.ahead, {}
        return self.runs - 1, there

    def _hand_over(self, following: GraphMemory | None) -> None:
        """The running graph makes its last launch, and the first ones of the graph that follows."""
        self.places.append(self.total)
        self.ahead_since = len(self.places) - 1
        if following is not None:
            self.launch_ahead(following)

    def _enter_call(self, graph: GraphMemory) -> tuple[int, int]:
        self.places.append(self.total)
        begins = len(self.places) - 1
        return (self.ahead_since if self.ahead else begins), begins

    def _leave_call(self, ahead: int, begins: int) -> None:
        self.places.append(self.total)
        self.calls.append(CallPlaces(ahead, begins, begins + 1, begins + 2))

    def _begin(self, graph: GraphMemory, node: fx.Node, there: _There) -> None:
        self._make(graph, node, there)
        if (copied := graph.runs.copies.get(node)) is not None:
            self.free(there.pop(copied))

    def _make(self, graph: GraphMemory, node: fx.Node, there: _There) -> None:
        """Make what a node makes, unless it was launched ahead."""
        if node in graph.buffers and node not in there:
            there[node] = self._made_by_gather("unsharded", graph.buffers[node], GATHERING)
        for i in graph.made.get(node, ()):
            if i not in there:
                is_gathered = graph.live.storages[i].maker.target in GATHERS and not graph.buffers
                make = self._made_by_gather if is_gathered else self.make
                there[i] = make(graph.category[i], graph.nbytes[i])

    def _made_by_gather(self, category: str, nbytes: int, stream: str = MAIN) -> _MadeTensor:
        self.gathered += nbytes
        self.most_gathered = max(self.most_gathered, self.gathered)
        return self.make(category, nbytes, stream)._replace(gathered=nbytes)

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
