"""When everything in a graph happens: compute in program order, collectives in one in-order queue per group.

Copies and casts on a side stream have a queue for each stream, which begins with what the main one has done by then.

[Note: expressions along a branch]
Where two times meet (a wait, a busy queue), the later one counts. Which one is later is decided by numbers, at the
world size and shapes that the graph was traced with; the result is the sum of the costs along the path that was later,
and so an expression again. It is exact as long as other shapes would decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from fxshard.cost.comm import Launch
from fxshard.cost.symbols import Point, Quantity, Sum
from fxshard.ir import collectives, tags
from fxshard.ir.liveness import Liveness


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One launch on its queue; seconds since the graph began, at the traced world size and shapes.

    Attributes:
        launch: the collective.
        start: when the queue takes it up.
        end: when it is done.
        exposed: how long compute stood at its wait.
    """

    launch: Launch
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
class _InFlight:
    launch: Launch
    start: _Moment
    end: _Moment
    exposed: float = 0.0


class _Filled(NamedTuple):
    """When a storage will have been filled, and by what: a launch, or a copy of what a launch brought."""

    flight: _InFlight
    end: _Moment


def simulate(
    live: Liveness, compute: Mapping[fx.Node, Quantity], launches: Mapping[fx.Node, Launch], point: Point
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
    flights: dict[fx.Node, _InFlight] = {}
    filled: dict[int, _Filled] = {}
    cast: dict[int, _Moment] = {}  # storage -> when a side stream will have made it
    for node in live.nodes:
        read = [index for source in node.all_input_nodes for index in live.storages_of[source]]
        if node in launches:
            launch = launches[node]
            start = _latest(clock, queues.get(launch.group), *map(cast.get, read))
            end = _after(start, launch.seconds, point, communicates=True)
            queues[launch.group] = end
            flights[node] = _InFlight(launch, start, end)
            filled |= dict.fromkeys(live.storages_of[node], _Filled(flights[node], end))
        elif node.target is collectives.WAIT:
            for flight, end in filter(None, map(filled.get, live.storages_of[node])):
                flight.exposed += max(0.0, end.time - clock.time)
                clock = _latest(clock, end)
        elif node in compute and (stream := tags.tags_of(node).get(tags.STREAM)):
            source = next(filter(None, map(filled.get, read)), None)
            start = _latest(clock, queues.get(stream), source.end if source else None, *map(cast.get, read))
            queues[stream] = end = _after(start, compute[node], point, communicates=True)
            made = live.storages_of[node]
            if source is None:
                cast |= dict.fromkeys(made, end)
            else:
                filled |= dict.fromkeys(made, _Filled(source.flight, end))
        elif node in compute:
            clock = _after(clock, compute[node], point)
            computed.append(clock)
    transfers = tuple(
        Transfer(launch=f.launch, start=f.start.time, end=f.end.time, exposed=f.exposed) for f in flights.values()
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
