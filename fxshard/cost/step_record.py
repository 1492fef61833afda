"""What happened in a simulated step, to look at and to compare: kernels, launches, waits, and memory over time."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import fx

from fxshard.cost.step import COMPUTE, GraphOfStep, GraphRun, Interval
from fxshard.cost.step_memory import MemoryChange

PRODUCT, ATTENTION, OTHER = "product", "attention", "other"
"""Kinds of kernels: matrix products and convolutions, attention, all else."""


class NodeWork(NamedTuple):
    """What one node of compute does, each time that its graph runs."""

    node: fx.Node
    kind: str
    seconds: float  # if nothing slows it
    flops: float
    nbytes: float


class Kernel(NamedTuple):
    """A node of compute in a step."""

    work: NodeWork
    run: int  # index in `StepRecord.runs`
    start: float
    end: float

    @property
    def kind(self) -> str:
        """One of the kinds above."""
        return self.work.kind

    @property
    def seconds(self) -> float:
        """How long it takes, beside what slows it."""
        return self.end - self.start


class MemoryOverTime(NamedTuple):
    """Bytes by category after each change in a step."""

    seconds: np.ndarray  # [changes], rising
    categories: Sequence[str]
    nbytes: np.ndarray  # [changes, categories]


class ExposedLaunch(NamedTuple):
    """A launch that compute stands waiting for."""

    label: str  # "all_gather layers.3"
    stage: str
    node: str  # in the graph of that stage
    seconds: float  # in all microbatches


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRecord:
    """A step on the clock and in memory."""

    intervals: Sequence[Interval]  # what each stream did when
    runs: Sequence[GraphRun]  # the graphs that ran, in the order in which they began
    standing: Mapping[str, int]  # category -> bytes that are held when a step begins
    changes: Sequence[MemoryChange]  # what was made and freed in one microbatch
    seconds: float  # of the step
    microbatches: int = 1  # of the step; each runs as many graphs

    @property
    def launches(self) -> list[Interval]:
        """Launches and copies, in the order in which compute comes to them."""
        return [each for each in self.intervals if each.stream != COMPUTE]

    @property
    def spans(self) -> dict[int, tuple[float, float]]:
        """Index of a run -> when its compute begins and ends; that of the graphs that it calls is in between."""
        found: dict[int, tuple[float, float]] = {}
        for each in self.intervals:
            if _is_of_graph(each):
                found[each.run] = (found.get(each.run, (each.start,))[0], each.end)
        return found

    @property
    def stands(self) -> list[Interval]:
        """When compute runs no node of a graph: waits, copies out of what was gathered, the optimizer."""
        return [each for each in self.intervals if each.stream == COMPUTE and each.name != COMPUTE]

    @property
    def exposed(self) -> list[ExposedLaunch]:
        """The launches that compute stands waiting for, longest first; their sum is the step's exposed time."""
        found: dict[tuple[str, str, str], float] = {}
        for each in (each for each in self.launches if each.exposed):
            key = self.label(each), self.runs[each.run].graph.stage, each.name
            found[key] = found.get(key, 0.0) + each.exposed
        return sorted((ExposedLaunch(*key, seconds) for key, seconds in found.items()), key=lambda e: -e.seconds)

    @property
    def collectives(self) -> list[tuple[Interval, tuple[str, float]]]:
        """The launches without copies, each with its op and the bytes of its whole buffer."""
        timelines = [(each, self.runs[each.run].graph.timeline) for each in self.launches]
        return [
            (each, (of.launches[each.node].op, of.launched_bytes[each.node]))
            for each, of in timelines
            if each.node in of.launches
        ]

    def label(self, interval: Interval) -> str:
        """Say what a launch is, and of which block or unit."""
        graph, name = self.runs[interval.run]
        launch = graph.timeline.launches.get(interval.node) if interval.node else None
        return f"{launch.label if launch else interval.name} {name or (launch.unit if launch else '') or 'root'}"

    def kernels(self) -> Iterator[Kernel]:
        """Yield all nodes of compute; in a stretch that a collective slows, each of them is slowed alike."""
        for each in self.intervals:
            works = work_of(self.runs[each.run].graph)[slice(*each.places)] if each.stream == COMPUTE else ()
            alone = sum(work.seconds for work in works if work)
            at, factor = each.start, (each.end - each.start) / alone if alone else 0.0
            for work in (work for work in works if work):
                until = at + work.seconds * factor
                yield Kernel(work, each.run, at, until)
                at = until

    def memory(self) -> MemoryOverTime:
        """Return what is held after each change; of several microbatches, each holds what one of them does."""
        categories = list(dict.fromkeys([*self.standing, *(change.category for change in self.changes)]))
        columns = {name: i for i, name in enumerate(categories)}
        in_one = len(self.runs) // self.microbatches
        nodes = _NodeTimes(self)
        last = [change for change in self.changes if change.run < 0]
        within = [change for change in self.changes if change.run >= 0]
        changes = [(change.run + i * in_one, change) for i in range(self.microbatches) for change in within]
        times = [nodes.time_of(run, change) for run, change in changes] + [self.seconds] * len(last)
        deltas = np.zeros((len(times) + 1, len(categories)))
        deltas[0] = [self.standing.get(name, 0) for name in categories]
        for row, change in enumerate([*(change for _, change in changes), *last], start=1):
            deltas[row, columns[change.category]] = change.nbytes
        seconds = np.maximum.accumulate(np.array([0.0, *times]))
        return MemoryOverTime(seconds, categories, deltas.cumsum(0))


@functools.lru_cache(maxsize=64)
def work_of(graph: GraphOfStep) -> list[NodeWork | None]:
    """Return for each node of a graph what it does, `None` if it is no compute of the device's own."""
    timeline = graph.timeline
    return [
        NodeWork(node, _kind(node, *timeline.work_of(node)), timeline.seconds[node], *timeline.work_of(node))
        if node in timeline.compute and node not in timeline.queues
        else None
        for node in timeline.nodes
    ]


def _is_of_graph(each: Interval) -> bool:
    """Whether compute runs nodes of a graph, or copies for them."""
    return each.stream == COMPUTE and each.run >= 0 and each.node is None


def _kind(node: fx.Node, flops: float, nbytes: float) -> str:
    return OTHER if not flops else ATTENTION if "attention" in f"{node.target} {node.args}" else PRODUCT


class _NodeTimes:
    """When compute comes to a node of a run."""

    def __init__(self, record: StepRecord) -> None:
        self._runs = record.runs
        self._of: dict[int, list[Interval]] = {}
        for each in record.intervals:
            if _is_of_graph(each):
                self._of.setdefault(each.run, []).append(each)

    def time_of(self, run: int, change: MemoryChange) -> float:
        intervals = self._of.get(run)
        if not intervals:
            return 0.0  # it takes no time: what came before counts
        search = bisect.bisect_left if change.is_called else bisect.bisect_right
        at = search(intervals, change.place, key=lambda each: each.places[0]) - 1
        if at < 0:
            return intervals[0].start
        found, before = intervals[at], self._runs[run].graph.timeline.before
        first, end = found.places
        passed, whole = before(min(change.place, end)) - before(first), before(end) - before(first)
        return found.start + (found.end - found.start) * (passed / whole if whole else 1.0)
