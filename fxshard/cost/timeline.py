"""When everything in a graph happens: compute in program order, collectives in one in-order queue per group.

Copies and casts on a side stream have a queue for each stream, which begins with what the main one has done by then.

[Note: expressions along a branch]
Where two times meet (a wait, a busy queue), the later one counts. Which one is later is decided by numbers, at the
world size and shapes that the graph was traced with; the result is the sum of the costs along the path that was later,
and so an expression again. It is exact as long as other shapes would decide alike.

A schedule is tried hundreds of times, so a graph is reduced to its *track*: the compute before each node, added up, and
what is launched and waited for where. Times are seconds at the world size and shapes that the graph was traced with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from fxshard.cost.comm import LaunchCost, launches_of
from fxshard.cost.hardware import HardwareSpec
from fxshard.cost.roofline import FREE, ComputeModel
from fxshard.cost.sizes import sizes_of
from fxshard.cost.symbols import Point, Quantity, Sum
from fxshard.ir import collectives, tags
from fxshard.ir.liveness import Liveness
from fxshard.ir.plan import FramePlan


@dataclass(frozen=True, kw_only=True)
class QueueSlot:
    """One launch on its queue.

    Attributes:
        start: when the queue takes it up; seconds since the graph began.
        behind: the launch that the queue did right before, `None` if it stood idle.
        exposed: how long compute stood at its waits.
    """

    start: float
    behind: fx.Node | None
    exposed: float


class Track:
    """A graph on the clock, to be asked again and again."""

    def __init__(self, graph: fx.Graph, plan: FramePlan, hardware: HardwareSpec) -> None:
        """Cost every node of `graph` once."""
        sizes = sizes_of(graph, plan)
        model = ComputeModel(sizes.live, hardware, sizes.point)
        costs = [model.cost(node) for node in sizes.live.nodes]
        seconds = [0.0 if cost is FREE else float(sizes.point.value(cost.seconds)) for cost in costs]
        self.before = dict(zip(sizes.live.nodes, itertools.accumulate(seconds, initial=0.0), strict=False))
        """Node -> seconds of compute before it."""
        self.launches: dict[fx.Node, LaunchCost] = launches_of(sizes, hardware)
        self.seconds = {node: float(sizes.point.value(launch.seconds)) for node, launch in self.launches.items()}
        self.places = {node: i for i, node in enumerate(sizes.live.nodes)}
        owner = {index: node for node in self.launches for index in sizes.live.storages_of[node]}
        """Storage -> the launch that fills it."""
        self.waits: dict[fx.Node, set[fx.Node]] = {
            node: {owner[index] for index in sizes.live.storages_of[node] if index in owner}
            for node in sizes.live.nodes
            if collectives.is_wait(node)
        }

    def run(self, moved: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, QueueSlot]:
        """The transfers in the order of their launches.

        Args:
            moved: launch or wait -> the node right before which it stands instead; those that go to one place keep the
                order of this mapping, ahead of what stands there.
        """
        order_of = {node: i for i, node in enumerate(moved)}
        events = sorted(
            (self.places[moved.get(node, node)], order_of.get(node, len(moved)), self.places[node], node)
            for node in itertools.chain(self.launches, self.waits)
        )
        late = 0.0  # how much later than by compute alone
        free: dict[str, tuple[float, fx.Node]] = {}
        ends: dict[fx.Node, float] = {}
        found: dict[fx.Node, QueueSlot] = {}
        for *_, node in events:
            now = self.before[moved.get(node, node)] + late
            if node in self.launches:
                group = self.launches[node].group
                until, last = free.get(group, (0.0, None))
                start = max(now, until)
                ends[node] = start + self.seconds[node]
                free[group] = ends[node], node
                found[node] = QueueSlot(start=start, behind=last if until >= now else None, exposed=0.0)
                continue
            for launch in self.waits[node]:
                exposed = max(0.0, ends[launch] - (self.before[moved.get(node, node)] + late))
                late += exposed
                found[launch] = QueueSlot(
                    start=found[launch].start, behind=found[launch].behind, exposed=found[launch].exposed + exposed
                )
        return found


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One launch on its queue; seconds since the graph began, at the traced world size and shapes.

    Attributes:
        launch: the collective.
        start: when the queue takes it up.
        end: when it is done.
        exposed: how long compute stood at its wait.
    """

    launch: LaunchCost
    start: float
    end: float
    exposed: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What a simulation found.

    Attributes:
        total: seconds until the last node has run.
        exposed: seconds that compute stood at waits.
        transfers: the launches, in program order.
    """

    total: Quantity
    exposed: Quantity
    transfers: tuple[Transfer, ...]


@dataclass(eq=False, slots=True)
class _Moment:
    """A time and how it came about: `step` seconds after `before`."""

    time: float
    before: _Moment | None
    step: Quantity
    communicates: bool = False


@dataclass(eq=False, slots=True)
class _QueuedLaunch:
    launch: LaunchCost
    start: _Moment
    end: _Moment
    exposed: float = 0.0


class _Filled(NamedTuple):
    """When a storage will have been filled, and by what: a launch, or a copy of what a launch brought."""

    group: _QueuedLaunch
    end: _Moment


def simulate(
    live: Liveness, compute: Mapping[fx.Node, Quantity], launches: Mapping[fx.Node, LaunchCost], point: Point
) -> Timeline:
    """Run a graph on the clock; linear in its nodes.

    Args:
        live: of the graph; says which launch a wait is for.
        compute: node -> seconds; nodes that take none may be absent.
        launches: from `comm.launches_of`.
        point: where times are compared.
    """
    clock = _Moment(0.0, None, 0.0)
    computed: list[_Moment] = []
    queues: dict[str, _Moment] = {}  # by group, or by side stream
    groups: dict[fx.Node, _QueuedLaunch] = {}
    filled: dict[int, _Filled] = {}
    cast: dict[int, _Moment] = {}  # storage -> when a side stream will have made it
    for node in live.nodes:
        read = [index for source in node.all_input_nodes for index in live.storages_of[source]]
        if node in launches:
            launch = launches[node]
            start = _latest(clock, queues.get(launch.group), *map(cast.get, read))
            end = _after(start, launch.seconds, point, communicates=True)
            queues[launch.group] = end
            groups[node] = _QueuedLaunch(launch, start, end)
            filled |= dict.fromkeys(live.storages_of[node], _Filled(groups[node], end))
        elif node.target is collectives.WAIT:
            for group, end in filter(None, map(filled.get, live.storages_of[node])):
                group.exposed += max(0.0, end.time - clock.time)
                clock = _latest(clock, end)
        elif node in compute and (stream := tags.meta_of(node).stream):
            source = next(filter(None, map(filled.get, read)), None)
            start = _latest(clock, queues.get(stream), source.end if source else None, *map(cast.get, read))
            queues[stream] = end = _after(start, compute[node], point, communicates=True)
            made = live.storages_of[node]
            if source is None:
                cast |= dict.fromkeys(made, end)
            else:
                filled |= dict.fromkeys(made, _Filled(source.group, end))
        elif node in compute:
            clock = _after(clock, compute[node], point)
            computed.append(clock)
    transfers = tuple(
        Transfer(launch=f.launch, start=f.start.time, end=f.end.time, exposed=f.exposed) for f in groups.values()
    )
    return _timeline(clock, computed, transfers)


def _timeline(end: _Moment, computed: list[_Moment], transfers: tuple[Transfer, ...]) -> Timeline:
    """Exposed time is what the critical path spends on the link, less the compute that it does not pass through."""
    total, exposed = Sum(), Sum()
    on_path: set[_Moment] = set()
    moment: _Moment | None = end
    while moment is not None:
        on_path.add(moment)
        total.add(moment.step)
        if moment.communicates:
            exposed.add(moment.step)
        moment = moment.before
    for step in computed:
        if step not in on_path:
            exposed.add(step.step, -1)
    return Timeline(total=total.total, exposed=exposed.total, transfers=transfers)


def _latest(first: _Moment, *others: _Moment | None) -> _Moment:
    """The latest; the first of those that are equally late."""
    return max((first, *filter(None, others)), key=lambda moment: moment.time)


def _after(before: _Moment, step: Quantity, point: Point, *, communicates: bool = False) -> _Moment:
    return _Moment(before.time + point.value(step), before, step, communicates)
