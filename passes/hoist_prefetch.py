"""Launch all_gathers ahead of need, while the units before them compute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx
from torch.fx import GraphModule

from fxshard.cost.overlap import Track
from fxshard.errors import ConfigError
from fxshard.ir import collectives, flow, liveness, schedule, text
from fxshard.ir.flow import Window
from fxshard.ir.room import Room
from fxshard.ir.schedule import Flight
from fxshard.passes._base import Fact, GraphPass, PassContext


@dataclass(frozen=True, kw_only=True)
class HoistPrefetch(GraphPass):
    """Move all_gathers up, across module boundaries, by the user's lists or by a depth.

    Before   %a0 = all_gather  %w0 = wait  compute(%w0)  %a1 = all_gather  %w1 = wait  compute(%w1)
    After    %a0 = all_gather  %a1 = all_gather  %w0 = wait  compute(%w0)  %w1 = wait  compute(%w1)

    Attributes:
        depth: how many units ahead. A unit is launched where it is that far ahead of need and the unit before has been
            read for the last time: never more than `depth + 1` are gathered at once, those that stay gathered apart.
            "auto": for each unit as many as it takes to hide its gather, as `cost/overlap.py` finds for `hardware`.

    A unit with a list (`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`) launches what is in it,
    in this order, right after its own wait, and nothing else; one whose list is `None` launches nothing ahead.

    Numerics: unchanged.
    Memory: `depth` gathered units more; never beyond the budget.
    No-op: depth=0 and no lists, or a single gather at the start.
    Limits: within one graph.
    Source: FSDP2 `_fully_shard.py` (`set_modules_to_forward_prefetch`), `_fsdp_param_group.py` (`_prefetch_unshard`).
    """

    requires = frozenset({Fact.COLLECTIVES})
    reorders_only = True

    depth: int | Literal["auto"] = 1

    def __post_init__(self) -> None:
        """Reject what is no depth."""
        if self.depth == "auto":
            return
        if isinstance(self.depth, bool) or not isinstance(self.depth, int) or self.depth < 0:
            raise ConfigError(f'prefetch must be a number of units, "off" or "auto", got {self.depth!r}.')

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
        found, before = schedule.flights(gm.graph, collectives.GATHERS), list(gm.graph.nodes)
        if not found:
            return False
        room = Room(gm.graph, ctx.unsharded_budget_bytes)
        places: dict[fx.Node, fx.Node] = {}
        wishes = self._wishes(found, gm.graph, ctx)
        for wish in wishes:
            place, why = wish.within(room)
            if place < wish.flight.carried[0]:  # nodes compare by their place in the graph
                room.take(place, wish.flight.carried[0], _gathered_bytes(wish.flight))
                places |= dict.fromkeys(wish.flight.carried, place)
            ctx.note(wish.flight.launches[0], why)
        offered = {wish.flight for wish in wishes}
        for flight in found:
            if flight not in offered:
                ctx.note(flight.launches[0], "where it is needed: nothing launches it ahead")
        schedule.move(places)
        return before != list(gm.graph.nodes)

    def _wishes(self, found: Sequence[Flight], graph: fx.Graph, ctx: PassContext) -> list[_Wish]:
        """For each flight that may go up the earliest place that another one gives it; in order of the places."""
        moving = frozenset(node for flight in found for node in flight.carried)
        needed = _needed(found, moving, graph, ctx)
        depths = [self.depth] * len(found) if isinstance(self.depth, int) else _auto(found, needed, moving, graph, ctx)
        flights_of: dict[str, list[int]] = {}
        for k, flight in enumerate(found):
            for unit in flight.units:
                flights_of.setdefault(unit, []).append(k)
        wishes: dict[int, _Wish] = {}

        def offer(k: int, place: fx.Node, why: str) -> None:
            if k not in wishes or place < wishes[k].place:
                wishes.pop(k, None)  # among equal places the order of the offers counts
                wishes[k] = _Wish(found[k], place, moving, why)

        for j, flight in enumerate(found):
            listed = _listed(flight, ctx)
            for k in range(j, min(j + max(depths) + 1, len(found))) if listed == () and self.depth else ():
                if j == k == 0:
                    offer(k, needed[j], "first of the graph")
                elif 0 < k - j <= depths[k]:
                    offer(k, needed[j], f"{k - j} ahead, before {flight.name} is needed")
            for unit in listed or ():
                for k in [k for k in flights_of.get(unit, ()) if k > j][:1]:
                    offer(k, schedule.following(flight.waits[-1], moving), f"in the list of {flight.name}")
        for kept, start in _starts_of_kept(found, graph, ctx).items():
            for unit in ctx.plan.units[kept].backward_prefetch or ():
                for k in flights_of.get(unit, ())[:1]:
                    offer(k, schedule.following(start.prev, moving), f"in the list of {kept or 'root'}")
        return sorted(wishes.values(), key=lambda wish: wish.place)


@dataclass(frozen=True)
class _Wish:
    """Where a flight would go if nothing stood in its way."""

    flight: Flight
    place: fx.Node
    moving: frozenset[fx.Node]
    why: str

    def within(self, room: Room) -> tuple[fx.Node, str]:
        """The place that it gets, and why."""
        place, why, now = self.place, self.why, self.flight.carried[0]
        inputs = {s for n in self.flight.carried for s in n.all_input_nodes} - set(self.flight.carried)
        if (latest := max(inputs)) >= place:
            place, why = schedule.following(latest, self.moving), f"{why}; no earlier: it reads %{latest.name}"
        if place < now and (free := room.earliest(place, now, _gathered_bytes(self.flight))) != place:
            why = f"{why}; no earlier: {room.full_before(free, _gathered_bytes(self.flight))}"
            place = schedule.following(free.prev, self.moving)
        return place, why


def _needed(found: Sequence[Flight], moving: Collection[fx.Node], graph: fx.Graph, ctx: PassContext) -> list[fx.Node]:
    """For each flight the node before which it is about to be needed: its wait, or the end of the flight before it."""
    live = liveness.liveness(graph, donated=ctx.kind == "backward")
    flight_of = {launch: i for i, flight in enumerate(found) for launch in flight.launches}
    last_use = [0] * len(found)
    for parameter, value in flow.flow_of(graph, ctx.plan).parameters.items():
        if isinstance(value, Window) and value.launch in flight_of:
            i = flight_of[value.launch]
            last_use[i] = max(last_use[i], *(live.storages[s].last_use for s in live.storages_of[parameter]))
    needed = [schedule.following(schedule.last_input(graph), moving)]
    for flight, last in zip(found[1:], last_use[:-1], strict=True):
        is_freed = 0 < last < len(live.nodes) - 1
        end = schedule.following(live.nodes[last], moving) if is_freed else flight.waits[0]
        needed.append(min(flight.waits[0], end))
    return needed


def _auto(
    found: Sequence[Flight],
    needed: Sequence[fx.Node],
    moving: frozenset[fx.Node],
    graph: fx.Graph,
    ctx: PassContext,
) -> list[int]:
    """For each flight the smallest depth that hides it, or as much of it as any depth and the budget do.

    One after the other, by list scheduling: a launch goes up as long as compute stands at its wait and the link does
    something else before it than the gather before. Later flights count as one ahead until it is their turn.
    """
    track, room = Track(graph, ctx.plan, ctx.hardware), Room(graph, ctx.unsharded_budget_bytes)
    depths = [min(k, 1) for k in range(len(found))]

    def place_of(k: int) -> fx.Node:
        return _Wish(found[k], needed[max(0, k - depths[k])], moving, "").within(room)[0]

    moved = {launch: place_of(k) for k in range(len(found)) for launch in found[k].launches}
    for k, flight in enumerate(found):
        best = (math.inf, 0)
        while True:
            place = place_of(k)
            moved |= dict.fromkeys(flight.launches, place)
            transfers = track.run(moved)
            exposed = sum(transfers[launch].exposed for launch in flight.launches)
            best = min(best, (exposed, depths[k]), key=lambda tried: (round(tried[0], 6), tried[1]))
            follows = k > 0 and transfers[flight.launches[0]].behind in found[k - 1].launches
            if exposed < 1e-6 or follows or depths[k] >= k or place != needed[k - depths[k]]:
                break
            depths[k] += 1
        depths[k] = best[1]
        place = place_of(k)
        moved |= dict.fromkeys(flight.launches, place)
        room.take(place, flight.carried[0], _gathered_bytes(flight))
    return depths


def _starts_of_kept(found: Sequence[Flight], graph: fx.Graph, ctx: PassContext) -> dict[str, fx.Node]:
    """Unit with a list that backward need not gather -> the first node of its backward."""
    gathered = {unit for flight in found for unit in flight.units}
    kept = [unit for unit, plan in ctx.plan.units.items() if plan.backward_prefetch and unit not in gathered]
    starts: dict[str, fx.Node] = {}
    for node in graph.nodes if kept and ctx.kind == "backward" else ():
        module = text.module_of(node)
        if module is not None and (unit := ctx.plan.unit_of(module)) in kept:
            starts.setdefault(unit, node)
    return starts


def _listed(flight: Flight, ctx: PassContext) -> tuple[str, ...] | None:
    """What the units of a flight are to prefetch: theirs put together, the default only if it is that of all."""
    backward = ctx.kind == "backward"
    plans = [ctx.plan.units[unit] for unit in flight.units]
    lists = [plan.backward_prefetch if backward else plan.forward_prefetch for plan in plans]
    if all(listed == () for listed in lists):
        return ()
    joined = tuple(itertools.chain.from_iterable(listed for listed in lists if listed))
    return joined or None


def _gathered_bytes(flight: Flight) -> int:
    tensors = [tensor for launch in flight.launches for tensor in liveness.tensors_in(launch)]
    return sum(liveness.hint_of(tensor.untyped_storage().nbytes()) for tensor in tensors)
