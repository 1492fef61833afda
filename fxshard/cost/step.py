"""What a step takes whose model runs in several graphs: their timelines one after the other, on the same queues.

Compute is slowed while a collective runs, by the part of the device that its kernels take, and starts no sooner than
the host has launched it. A graph may call others: [Note: outlined traces] in `plan/outline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import NamedTuple

from torch import fx

from fxshard.cost.hardware import HardwareSpec
from fxshard.cost.timeline import Timeline
from fxshard.ir import launch_groups
from fxshard.ir.collectives import ALL_REDUCES, GATHERS, REDUCTIONS


class StepTime(NamedTuple):
    """Seconds that graphs take in a row, and how many of them compute stands at waits."""

    seconds: float
    exposed: float


class Interval(NamedTuple):
    """Something that a stream does in a step."""

    stream: str  # "compute", or the name of a queue
    name: str  # of a launch or copy, or what compute waits for
    start: float
    end: float


class GraphOfStep:
    """A graph of a step, and the gathers at its two ends.

    The first ones are launched by the graph before, behind the last ones of that (`passes/hand_off_prefetch.py`).
    """

    def __init__(
        self,
        graph: fx.Graph,
        timeline: Timeline,
        calls: Mapping[fx.Node, GraphOfStep] | None = None,
        *,
        copies_out: bool = False,
        resident: bool = False,
    ) -> None:
        """`timeline` is that of `graph`; `calls` are the graphs that run in the place of some of its nodes.

        With `copies_out` parameters are copied out of what was gathered, as FSDP2 does; `resident` ones are gathered in
        the first microbatch alone.
        """
        self.timeline, self.calls, self.resident = timeline, calls or {}, resident
        groups = launch_groups.groups_of(graph, GATHERS)
        self.first = tuple(node for node in groups[0].nodes if node in timeline.queues) if groups else ()
        self.last = groups[-1].launches[-1] if groups else None
        self.events = sorted([*timeline.needs, *self.calls])  # nodes compare by their place in the graph
        self.copies: dict[fx.Node, float] = {}  # wait for a gather -> seconds of the copy behind it
        for launch in (launch for group in groups for launch in group.launches if copies_out):
            waits = (event for event in self.events if launch in timeline.needs.get(event, ()))
            self.copies[next(waits)] = 2 * timeline.launched_bytes(launch) / timeline.hardware.memory_bandwidth
        kernels = accumulate((node in timeline.compute for node in graph.nodes), initial=0)
        self.kernels_before = dict(zip(graph.nodes, kernels, strict=False))
        self.num_kernels = len(timeline.compute)


def step_time(graphs: Sequence[GraphOfStep], hardware: HardwareSpec | None = None) -> StepTime:
    """Run graphs one after the other; the step ends once all that they launched is done.

    Without `hardware` the host is always ahead, and collectives take nothing from compute.
    """
    clock = Clock(hardware)
    clock.run_all(graphs)
    return StepTime(clock.now, clock.exposed)


@dataclass
class Clock:
    """How far a step has come.

    Attributes:
        hardware: for what the host and collectives do to compute; `None`: nothing.
        reduces: whether the graph that runs reduces gradients, or leaves them for a later microbatch.
        again: whether an earlier microbatch of the step has run.
        now: seconds since it began.
        exposed: those that compute stood at waits.
        exposed_by: name of what it waited for -> the same.
        host: when the host has launched all compute so far.
        free: queue -> when it will have done what it was given.
        taken: queue -> the share of compute's speed that the last of that takes.
        begun: launch of the next graph that is under way already -> when it is done.
        intervals: what happened when, if somebody wants to know.
    """

    hardware: HardwareSpec | None = None
    reduces: bool = True
    again: bool = False
    now: float = 0.0
    exposed: float = 0.0
    exposed_by: dict[str, float] = field(default_factory=dict)
    host: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    taken: dict[str, float] = field(default_factory=dict)
    begun: dict[fx.Node, float] = field(default_factory=dict)
    intervals: list[Interval] | None = None

    def run_all(self, graphs: Sequence[GraphOfStep], *, microbatches: int = 1, reduces_each: bool = True) -> None:
        """Run the graphs of a microbatch so many times, to the end of all that they launched.

        Each microbatch reduces its gradients, or the last one for all.
        """
        row = [*graphs] * microbatches
        for number, (graph, following) in enumerate(zip_longest(row, row[1:])):
            self.again, self.reduces = number >= len(graphs), reduces_each or number >= len(row) - len(graphs)
            self.run(graph, following)
        self._wait(max(self.free.values(), default=0.0), "the last launches")

    def run(self, graph: GraphOfStep, following: GraphOfStep | None) -> None:
        """Run one graph; the gathers that the following one begins with are launched in it."""
        timeline, done, began, kernels = graph.timeline, self.begun, 0.0, 0
        self.begun = {}
        called = [graph.calls[node] for node in graph.events if node in graph.calls]
        following = called[0] if called else following
        if graph.last is None and called:
            self._begin(following)
        for node in graph.events:
            before = timeline.computed_before(node)
            self._compute(before - began, graph.kernels_before[node] - kernels)
            began, kernels = before, graph.kernels_before[node]
            if node in graph.calls:
                self.run(called.pop(0), called[0] if called else None)
                continue
            if node in timeline.queues:
                if node not in done and self._launches(graph, node):
                    self._launch(timeline, node, done)
                if node is graph.last:
                    self._begin(following)
            elif any(source in done for source in timeline.needs[node]):
                source = _latest(timeline, node, done)
                self._wait(_ready(timeline, node, done), timeline.launches[source].label if source else "")
                self._compute(graph.copies.get(node, 0.0), 0)
        self._compute(timeline.compute_seconds - began, graph.num_kernels - kernels)

    def _begin(self, following: GraphOfStep | None) -> None:
        if following is not None:
            for node in following.first:
                if self._launches(following, node):
                    self._launch(following.timeline, node, self.begun)

    def _launches(self, graph: GraphOfStep, node: fx.Node) -> bool:
        """Whether a graph launches in this microbatch what it has in it."""
        if node.target in _REDUCING:
            return self.reduces
        return not (graph.resident and self.again and node.target in GATHERS)

    def _compute(self, seconds: float, kernels: int) -> None:
        start = self.now
        if self.hardware is not None:
            self.host += kernels * self.hardware.host_overhead
        busy = sorted((end, self.taken.get(queue, 0.0)) for queue, end in self.free.items() if end > start)
        while busy:
            speed = max(1 - sum(share for _, share in busy), 0.1)
            until, _ = busy.pop(0)
            if seconds <= (until - self.now) * speed:
                seconds /= speed
                break
            seconds -= (until - self.now) * speed
            self.now = until
        self.now = max(self.now + seconds, self.host)
        self._note("compute", "compute", start, self.now)

    def _wait(self, until: float, what: str) -> None:
        if until > self.now:
            self.exposed += until - self.now
            self.exposed_by[what] = self.exposed_by.get(what, 0.0) + until - self.now
            self._note("compute", f"wait for {what}", self.now, until)
            self.now = until

    def _launch(self, timeline: Timeline, node: fx.Node, done: dict[fx.Node, float]) -> None:
        queue = timeline.queues[node]
        start = max(self.now, _ready(timeline, node, done), self.free.get(queue, 0.0))
        done[node] = self.free[queue] = start + timeline.seconds[node]
        self.taken[queue] = timeline.shares.get(node, 0.0)
        self._note(queue, node.name, start, self.free[queue])

    def _note(self, stream: str, name: str, start: float, end: float) -> None:
        if self.intervals is not None and end > start:
            self.intervals.append(Interval(stream, name, start, end))


_REDUCING = (*REDUCTIONS, *ALL_REDUCES)


def _ready(timeline: Timeline, node: fx.Node, done: Mapping[fx.Node, float]) -> float:
    """When all is done that a node needs."""
    return max((done[source] for source in timeline.needs[node] if source in done), default=0.0)


def _latest(timeline: Timeline, node: fx.Node, done: Mapping[fx.Node, float]) -> fx.Node | None:
    """The launch that a wait stands for longest, `None` if it waits for copies alone."""
    launches = [source for source in timeline.needs[node] if source in done and source in timeline.launches]
    return max(launches, key=done.__getitem__, default=None)
