"""What a step takes whose model runs in several graphs: their timelines one after the other, on the same queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from torch import fx

from fxshard.cost.timeline import Timeline
from fxshard.ir import launch_groups
from fxshard.ir.collectives import GATHERS


class StepTime(NamedTuple):
    """Seconds that graphs take in a row, and how many of them compute stands at waits."""

    seconds: float
    exposed: float


class GraphOfStep:
    """A graph of a step, and the gathers at its two ends.

    The first ones are launched by the graph before, behind the last ones of that (`passes/hand_off_prefetch.py`).
    """

    def __init__(self, graph: fx.Graph, timeline: Timeline) -> None:
        """`timeline` is that of `graph`."""
        self.timeline = timeline
        groups = launch_groups.groups_of(graph, GATHERS)
        self.first = tuple(groups[0].launches) if groups else ()
        self.last = groups[-1].launches[-1] if groups else None


def step_time(graphs: Sequence[GraphOfStep]) -> StepTime:
    """Run graphs one after the other; the step ends once all that they launched is done."""
    clock = _Clock()
    for graph, following in zip_longest(graphs, graphs[1:]):
        clock.run(graph, following)
    rest = max(0.0, max(clock.free.values(), default=0.0) - clock.now)
    return StepTime(clock.now + rest, clock.exposed + rest)


@dataclass
class _Clock:
    """How far a step has come.

    Attributes:
        now: seconds since it began.
        exposed: those that compute stood at waits.
        free: queue -> when it will have done what it was given.
        begun: launch of the next graph that is under way already -> when it is done.
    """

    now: float = 0.0
    exposed: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    begun: dict[fx.Node, float] = field(default_factory=dict)

    def run(self, graph: GraphOfStep, following: GraphOfStep | None) -> None:
        """Run one graph; the gathers that the following one begins with are launched in it."""
        timeline, done, began = graph.timeline, self.begun, 0.0
        self.begun = {}
        for node, needed in timeline.needs.items():
            self.now += timeline.computed_before(node) - began
            began = timeline.computed_before(node)
            ready = max((done[source] for source in needed), default=0.0)
            if node in timeline.queues:
                if node not in done:
                    done[node] = self._launch(timeline, node, ready)
                if node is graph.last and following is not None:
                    self.begun = {each: self._launch(following.timeline, each, 0.0) for each in following.first}
            elif ready > self.now:
                self.exposed += ready - self.now
                self.now = ready
        self.now += timeline.compute_seconds - began

    def _launch(self, timeline: Timeline, node: fx.Node, ready: float) -> float:
        queue = timeline.queues[node]
        self.free[queue] = max(self.now, ready, self.free.get(queue, 0.0)) + timeline.seconds[node]
        return self.free[queue]
