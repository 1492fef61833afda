"""When everything in a graph happens: compute in program order, collectives in one in-order queue per group.

[Note: expressions along a branch]
Where two times meet (a wait, a busy queue), the later one counts. Which one is later is decided by numbers, at the
world size and shapes that the graph was traced with; the result is the sum of the costs along the path that was later,
and so an expression again. It is exact as long as other shapes would decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxshard.cost.comm import Launch
from fxshard.cost.symbols import Point, Quantity, Sum
from fxshard.ir import collectives
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
    queues: dict[str, _Moment] = {}
    flights: dict[fx.Node, _InFlight] = {}
    filled_by: dict[int, _InFlight] = {}
    for node in live.nodes:
        if node in launches:
            launch = launches[node]
            start = _later(clock, queues.get(launch.group, clock))
            end = _after(start, launch.seconds, point, communicates=True)
            queues[launch.group] = end
            flights[node] = _InFlight(launch, start, end)
            filled_by |= dict.fromkeys(live.storages_of[node], flights[node])
        elif node.target is collectives.WAIT:
            for flight in filter(None, map(filled_by.get, live.storages_of[node])):
                flight.exposed += max(0.0, flight.end.time - clock.time)
                clock = _later(clock, flight.end)
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


def _later(one: _Moment, other: _Moment) -> _Moment:
    return other if other.time > one.time else one


def _after(before: _Moment, step: Quantity, point: Point, *, communicates: bool = False) -> _Moment:
    return _Moment(before.time + point.value(step), before, step, communicates)
