"""What a step takes whose model runs in several graphs: their timelines one after the other, on the same queues.

Compute is slowed while a collective runs, by the part of the device that its kernels take, and starts no sooner than
the host has launched it. A graph may call others: [Note: outlined traces] in `plan/outline.py`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from fxshard.cost.bucket_sizes import copy_seconds
from fxshard.cost.timeline import Timeline
from fxshard.ir import launch_groups, ops
from fxshard.ir.collectives import ALL_REDUCES, GATHERS, REDUCTIONS
from fxshard.ir.launch_groups import LaunchGroup


class StepTime(NamedTuple):
    """Seconds that graphs take in a row, and how many of them compute stands at waits."""

    seconds: float
    exposed: float


COMPUTE = "compute"
"""The stream of the device's own kernels."""


@dataclass(eq=False, slots=True, kw_only=True)
class Interval:
    """Something that a stream does in a step, in seconds since the step began."""

    stream: str  # `COMPUTE`, or the name of a queue
    name: str  # of a launch or copy, or what compute waits for
    start: float  # of the work
    end: float  # of the work
    run: int = -1  # index in `Clock.runs` of the graph that it is of, -1 for none
    places: tuple[int, int] = (0, 0)  # of the nodes that compute runs: the first one, and the one behind the last
    node: fx.Node | None = None  # a launch or copy
    share: float = 0.0  # of compute's speed that a launch takes
    launched: float = 0.0  # when compute came to a launch
    needed: float | None = None  # when compute came to the first wait for a launch
    exposed: float = 0.0  # how long compute stood at waits for a launch


class GraphOfStep:
    """A graph of a step, and the gathers at its two ends.

    The launches of its first unit are made by the graph before, behind the last one of that
    (`passes/hand_off_prefetch.py`).
    """

    def __init__(
        self,
        graph: fx.Graph,
        timeline: Timeline,
        calls: Mapping[fx.Node, GraphOfStep] | None = None,
        *,
        copies_out: bool = False,
        names: Mapping[fx.Node, str] | None = None,
        stage: str = "",
        resident: bool = False,
        in_subgroups: Collection[str] = (),
        reduces_at_once: bool = False,
        hands_over: bool = True,
    ) -> None:
        """`timeline` is that of `graph`; `calls` are the graphs that run in the place of some of its nodes.

        With `copies_out` parameters are copied out of what was gathered, as FSDP2 does; `resident` ones are gathered in
        the first microbatch alone. `names` are those of what `calls` stand for, `stage` is "forward" or "backward";
        both decide nothing. `in_subgroups` are units of which backward sends what forward has kept. With
        `reduces_at_once` compute stands until a reduction is done, as FSDP2's does where it has no streams. Unless the
        graph `hands_over`, it makes its own launches and no others.
        """
        self.graph, self.timeline, self.calls = graph, timeline, calls or {}
        self.names, self.stage, self.resident = names or {}, stage, resident
        self.reduces_at_once = reduces_at_once
        groups = launch_groups.groups_of(graph, GATHERS)
        hands_over = hands_over and bool(groups) and _is_handed_over(groups[0], in_subgroups)
        launches = [launch_groups.group_of(launch).nodes for launch in groups[0].launches] if groups else []
        self.ahead = tuple(itertools.chain(*launches)) if hands_over else ()
        self.first = tuple(node for node in self.ahead if node in timeline.queues)
        self.last = groups[-1].launches[-1] if groups else None
        self.events = sorted([*timeline.needs, *self.calls])  # nodes compare by their place in the graph
        self.copies: dict[fx.Node, fx.Node] = {}  # wait for a gather behind which it is copied -> the gather
        for launch in (launch for group in groups for launch in group.launches if copies_out):
            waits = (event for event in self.events if launch in timeline.needs.get(event, ()))
            self.copies[next(waits)] = launch
        begun = {node for node, cost in timeline.compute.items() if cost.starts}
        kernels = itertools.accumulate((node in begun for node in graph.nodes), initial=0)
        self.kernels_before = dict(zip(graph.nodes, kernels, strict=False))
        self.num_kernels = len(begun)


class GraphRun(NamedTuple):
    """One of the times that a graph runs in a step."""

    graph: GraphOfStep
    name: str  # of the block that it is, "" of what is around the blocks


def step_time(graphs: Sequence[GraphOfStep]) -> StepTime:
    """Run graphs one after the other as `Timeline.run` runs one; the step ends once all that they launched is done."""
    clock = Clock(is_slowed=False)
    clock.run_all(graphs)
    return StepTime(clock.now, clock.exposed)


@dataclass
class Clock:
    """How far a step has come."""

    is_slowed: bool = True  # whether the host, and collectives that run, slow compute
    reduces: bool = True  # whether the graph that runs reduces gradients, or leaves them for a later microbatch
    again: bool = False  # whether an earlier microbatch of the step has run
    now: float = 0.0  # seconds since it began
    exposed: float = 0.0  # those that compute stood at waits
    exposed_by: dict[str, float] = field(default_factory=dict)  # name of what it waited for -> the same
    host: float = 0.0  # when the host has launched all compute so far
    last: dict[str, Interval] = field(default_factory=dict)  # queue -> the last that it was given
    # launch of the next graph that is under way already -> what its queue does
    begun: dict[fx.Node, Interval] = field(default_factory=dict)
    runs: list[GraphRun] = field(default_factory=list)  # what ran, in the order in which it began
    intervals: list[Interval] = field(default_factory=list)  # what happened when

    def run_all(self, graphs: Sequence[GraphOfStep], *, microbatches: int = 1, reduces_each: bool = True) -> None:
        """Run the graphs of a microbatch so many times, to the end of all that they launched.

        Each microbatch reduces its gradients, or the last one for all.
        """
        row = [*graphs] * microbatches
        for number, (graph, following) in enumerate(itertools.zip_longest(row, row[1:])):
            self.again, self.reduces = number >= len(graphs), reduces_each or number >= len(row) - len(graphs)
            self.run(graph, following)
        if self.last:
            self._wait([*self.last.values()], "the last launches")

    def run(self, graph: GraphOfStep, following: GraphOfStep | None, name: str = "") -> None:
        """Run one graph; the gathers that the following one begins with are launched in it."""
        timeline, done, began, kernels, place = graph.timeline, self.begun, 0.0, 0, 0
        self.begun, run = {}, len(self.runs)
        self.runs.append(GraphRun(graph, name))
        called = [(graph.calls[node], graph.names.get(node, "")) for node in graph.events if node in graph.calls]
        if graph.last is None and called:
            self._begin(called[0][0])
        for node in graph.events:
            before, here = timeline.computed_before(node), timeline.place_of(node)
            self._compute(before - began, graph.kernels_before[node] - kernels, run, (place, here))
            began, kernels, place = before, graph.kernels_before[node], here
            if node in graph.calls:
                inner, inner_name = called.pop(0)
                self.run(inner, called[0][0] if called else None, inner_name)
                continue
            needed = [done[source] for source in timeline.needs[node] if source in done]
            if node in timeline.queues:
                if node not in done and self._launches(graph, node):
                    done[node] = self._launch(timeline, node, max((each.end for each in needed), default=0.0), run)
                    if graph.reduces_at_once and node.target in _REDUCING:
                        self._wait([done[node]], timeline.launches[node].label)
                if node is graph.last:
                    self._begin(called[0][0] if called else following)
            elif needed:
                self._wait(needed, *_latest_launch(timeline, needed))
                if node in graph.copies:
                    nbytes = timeline.launched_bytes[graph.copies[node]]
                    copied = copy_seconds(nbytes, timeline.hardware, is_kernel=False)
                    self._compute(copied, 0, run, (here, here), "copy out")
        end = len(timeline.nodes)
        self._compute(timeline.compute_seconds - began, graph.num_kernels - kernels, run, (place, end))

    def _begin(self, following: GraphOfStep | None) -> None:
        if following is not None:
            run = len(self.runs)  # the next that begins
            launched = [node for node in following.first if self._launches(following, node)]
            self.begun = {each: self._launch(following.timeline, each, 0.0, run) for each in launched}

    def _launches(self, graph: GraphOfStep, node: fx.Node) -> bool:
        """Whether a graph launches in this microbatch what it has in it."""
        if node.target in _REDUCING:
            return self.reduces
        return not (graph.resident and self.again and node.target in GATHERS)

    def _compute(self, seconds: float, kernels: int, run: int, places: tuple[int, int], name: str = COMPUTE) -> None:
        start = self.now
        if self.is_slowed:
            self.host += kernels * self.runs[run].graph.timeline.hardware.host_overhead
        busy = sorted((each.end, each.share) for each in self.last.values() if each.end > start)
        while busy:
            speed = max(1 - sum(share for _, share in busy), 0.1)
            until, _ = busy.pop(0)
            if seconds <= (until - self.now) * speed:
                seconds /= speed
                break
            seconds -= (until - self.now) * speed
            self.now = until
        self.now += seconds
        if self.now > start:
            self.intervals.append(
                Interval(stream=COMPUTE, name=name, start=start, end=self.now, run=run, places=places)
            )
        if self.host > self.now:
            self._stand("wait for the host", self.host)

    def _wait(self, needed: Sequence[Interval], what: str, cause: Interval | None = None) -> None:
        for each in needed:
            each.needed = self.now if each.needed is None else each.needed
        until = max(needed, key=_END)
        cause = cause or until
        if (seconds := until.end - self.now) > 0:
            self.exposed += seconds
            cause.exposed += seconds
            self.exposed_by[what] = self.exposed_by.get(what, 0.0) + seconds
            self._stand(f"wait for {what}", until.end, cause)

    def _stand(self, name: str, until: float, cause: Interval | None = None) -> None:
        run, node = (cause.run, cause.node) if cause else (-1, None)
        self.intervals.append(Interval(stream=COMPUTE, name=name, start=self.now, end=until, run=run, node=node))
        self.now = until

    def _launch(self, timeline: Timeline, node: fx.Node, ready: float, run: int) -> Interval:
        queue = timeline.queues[node]
        if self.is_slowed and (seconds := timeline.host_seconds.get(node, 0.0)):
            self._stand(f"launch of {timeline.launches[node].label}", self.now + seconds)
        start = max(self.now, ready, self.last[queue].end if queue in self.last else 0.0)
        self.last[queue] = Interval(
            stream=queue,
            name=node.name,
            start=start,
            end=start + timeline.seconds[node],
            run=run,
            node=node,
            share=timeline.shares.get(node, 0.0) * self.is_slowed,
            launched=self.now,
        )
        self.intervals.append(self.last[queue])
        return self.last[queue]


def _is_handed_over(group: LaunchGroup, in_subgroups: Collection[str]) -> bool:
    """Whether the graph before may launch it, as `passes/hand_off_prefetch.py` decides."""
    copied = any(node.target is ops.COPY_TO_DEVICE for node in group.nodes)
    return not copied and group.units.keys().isdisjoint(in_subgroups)


_END = operator.attrgetter("end")
_REDUCING = (*REDUCTIONS, *ALL_REDUCES)


def _latest_launch(timeline: Timeline, needed: Sequence[Interval]) -> tuple[str, Interval | None]:
    """Label and interval of the launch that a wait stands for longest, nothing if it waits for copies alone."""
    launches = [each for each in needed if each.node in timeline.launches]
    latest = max(launches, key=_END, default=None)
    return (timeline.launches[latest.node].label, latest) if latest and latest.node else ("", None)
