"""Launch all_gathers ahead of need, while the units before them compute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx
from torch.fx import GraphModule

from fxshard.cost.timeline import Track
from fxshard.errors import ConfigError
from fxshard.ir import collectives, dataflow, launch_groups, liveness, text
from fxshard.ir.dataflow import Window
from fxshard.ir.launch_groups import LaunchGroup
from fxshard.ir.memory_budget import MemoryBudget
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class HoistPrefetch(GraphPass):
    """Move all_gathers up, across module boundaries, by the user's lists or by a depth.

    Before   %a0 = all_gather  %w0 = wait  compute(%w0)  %a1 = all_gather  %w1 = wait  compute(%w1)
    After    %a0 = all_gather  %a1 = all_gather  %w0 = wait  compute(%w0)  %w1 = wait  compute(%w1)

    Attributes:
        depth: how many units ahead. A unit is launched where it is that far ahead of need and the unit before has been
            read for the last time: never more than `depth + 1` are gathered at once, those that stay gathered apart.
            "auto": for each unit as many as it takes to hide its gather, as `cost/timeline.py` finds for `hardware`.

    A unit with a list (`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`) launches what is in it,
    in this order, right after its own wait, and nothing else; one whose list is `None` launches nothing ahead.

    Numerics: unchanged.
    Memory: `depth` gathered units more; never beyond the budget.
    No-op: depth=0 and no lists, or a single gather at the start.
    Limits: within one graph.
    Source: FSDP2 `_fully_shard.py` (`set_modules_to_forward_prefetch`), `_fsdp_param_group.py` (`_prefetch_unshard`).
    """

    requires = frozenset({Property.COLLECTIVES})
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
        found, before = launch_groups.groups_of(gm.graph, collectives.GATHERS), list(gm.graph.nodes)
        if not found:
            return False
        room = MemoryBudget(gm.graph, ctx.unsharded_budget_bytes)
        places: dict[fx.Node, fx.Node] = {}
        wishes = self._wishes(found, gm.graph, ctx)
        for wish in wishes:
            place, why = wish.within(room)
            if place < wish.group.carried[0]:  # nodes compare by their place in the graph
                room.take(place, wish.group.carried[0], _gathered_bytes(wish.group))
                places |= dict.fromkeys(wish.group.carried, place)
            ctx.note(wish.group.launches[0], why)
        offered = {wish.group for wish in wishes}
        for group in found:
            if group not in offered:
                ctx.note(group.launches[0], "where it is needed: nothing launches it ahead")
        launch_groups.move(places)
        return before != list(gm.graph.nodes)

    def _wishes(self, found: Sequence[LaunchGroup], graph: fx.Graph, ctx: PassContext) -> list[_Wish]:
        """For each launch group that may go up the earliest place that another one gives it; in order of the places."""
        moving = frozenset(node for group in found for node in group.carried)
        needed = _needed(found, moving, graph, ctx)
        depths = [self.depth] * len(found) if isinstance(self.depth, int) else _auto(found, needed, moving, graph, ctx)
        groups_of_unit: dict[str, list[int]] = {}
        for k, group in enumerate(found):
            for unit in group.units:
                groups_of_unit.setdefault(unit, []).append(k)
        wishes: dict[int, _Wish] = {}

        def offer(k: int, place: fx.Node, why: str) -> None:
            if k not in wishes or place < wishes[k].place:
                wishes.pop(k, None)  # among equal places the order of the offers counts
                wishes[k] = _Wish(found[k], place, moving, why)

        for j, group in enumerate(found):
            listed = _listed(group, ctx)
            for k in range(j, min(j + max(depths) + 1, len(found))) if listed == () and self.depth else ():
                if j == k == 0:
                    offer(k, needed[j], "first of the graph")
                elif 0 < k - j <= depths[k]:
                    offer(k, needed[j], f"{k - j} ahead, before {group.name} is needed")
            for unit in listed or ():
                for k in [k for k in groups_of_unit.get(unit, ()) if k > j][:1]:
                    offer(k, launch_groups.following(group.waits[-1], moving), f"in the list of {group.name}")
        for kept, start in _starts_of_kept(found, graph, ctx).items():
            for unit in ctx.plan.units[kept].backward_prefetch or ():
                for k in groups_of_unit.get(unit, ())[:1]:
                    offer(k, launch_groups.following(start.prev, moving), f"in the list of {kept or 'root'}")
        return sorted(wishes.values(), key=lambda wish: wish.place)


@dataclass(frozen=True)
class _Wish:
    """Where a launch group would go if nothing stood in its way."""

    group: LaunchGroup
    place: fx.Node
    moving: frozenset[fx.Node]
    why: str

    def within(self, room: MemoryBudget) -> tuple[fx.Node, str]:
        """The place that it gets, and why."""
        place, why, now = self.place, self.why, self.group.carried[0]
        inputs = {s for n in self.group.carried for s in n.all_input_nodes} - set(self.group.carried)
        if (latest := max(inputs)) >= place:
            place, why = launch_groups.following(latest, self.moving), f"{why}; no earlier: it reads %{latest.name}"
        if place < now and (free := room.earliest(place, now, _gathered_bytes(self.group))) != place:
            why = f"{why}; no earlier: {room.full_before(free, _gathered_bytes(self.group))}"
            place = launch_groups.following(free.prev, self.moving)
        return place, why


def _needed(
    found: Sequence[LaunchGroup], moving: Collection[fx.Node], graph: fx.Graph, ctx: PassContext
) -> list[fx.Node]:
    """For each group the node before which it is about to be needed: its wait, or the end of the one before it."""
    live = liveness.liveness(graph, donated=ctx.kind == "backward")
    group_of_launch = {launch: i for i, group in enumerate(found) for launch in group.launches}
    last_use = [0] * len(found)
    for parameter, value in dataflow.dataflow_of(graph, ctx.plan).parameters.items():
        if isinstance(value, Window) and value.launch in group_of_launch:
            i = group_of_launch[value.launch]
            last_use[i] = max(last_use[i], *(live.storages[s].last_use for s in live.storages_of[parameter]))
    needed = [launch_groups.following(launch_groups.last_input(graph), moving)]
    for group, last in zip(found[1:], last_use[:-1], strict=True):
        is_freed = 0 < last < len(live.nodes) - 1
        end = launch_groups.following(live.nodes[last], moving) if is_freed else group.waits[0]
        needed.append(min(group.waits[0], end))
    return needed


def _auto(
    found: Sequence[LaunchGroup],
    needed: Sequence[fx.Node],
    moving: frozenset[fx.Node],
    graph: fx.Graph,
    ctx: PassContext,
) -> list[int]:
    """For each launch group the smallest depth that hides it, or as much of it as any depth and the budget do.

    One after the other, by list scheduling: a launch goes up as long as compute stands at its wait and the link does
    something else before it than the gather before. Later launch groups count as one ahead until it is their turn.
    """
    track, room = Track(graph, ctx.plan, ctx.hardware), MemoryBudget(graph, ctx.unsharded_budget_bytes)
    depths = [min(k, 1) for k in range(len(found))]

    def place_of(k: int) -> fx.Node:
        return _Wish(found[k], needed[max(0, k - depths[k])], moving, "").within(room)[0]

    moved = {launch: place_of(k) for k in range(len(found)) for launch in found[k].launches}
    for k, group in enumerate(found):
        best = (math.inf, 0)
        while True:
            place = place_of(k)
            moved |= dict.fromkeys(group.launches, place)
            transfers = track.run(moved)
            exposed = sum(transfers[launch].exposed for launch in group.launches)
            best = min(best, (exposed, depths[k]), key=lambda tried: (round(tried[0], 6), tried[1]))
            follows = k > 0 and transfers[group.launches[0]].behind in found[k - 1].launches
            if exposed < 1e-6 or follows or depths[k] >= k or place != needed[k - depths[k]]:
                break
            depths[k] += 1
        depths[k] = best[1]
        place = place_of(k)
        moved |= dict.fromkeys(group.launches, place)
        room.take(place, group.carried[0], _gathered_bytes(group))
    return depths


def _starts_of_kept(found: Sequence[LaunchGroup], graph: fx.Graph, ctx: PassContext) -> dict[str, fx.Node]:
    """Unit with a list that backward need not gather -> the first node of its backward."""
    gathered = {unit for group in found for unit in group.units}
    kept = [unit for unit, plan in ctx.plan.units.items() if plan.backward_prefetch and unit not in gathered]
    starts: dict[str, fx.Node] = {}
    for node in graph.nodes if kept and ctx.kind == "backward" else ():
        module = text.module_of(node)
        if module is not None and (unit := ctx.plan.unit_of(module)) in kept:
            starts.setdefault(unit, node)
    return starts


def _listed(group: LaunchGroup, ctx: PassContext) -> tuple[str, ...] | None:
    """What the units of a launch group are to prefetch: theirs put together, the default only if it is that of all."""
    backward = ctx.kind == "backward"
    plans = [ctx.plan.units[unit] for unit in group.units]
    lists = [plan.backward_prefetch if backward else plan.forward_prefetch for plan in plans]
    if all(listed == () for listed in lists):
        return ()
    joined = tuple(itertools.chain.from_iterable(listed for listed in lists if listed))
    return joined or None


def _gathered_bytes(group: LaunchGroup) -> int:
    tensors = [tensor for launch in group.launches for tensor in liveness.tensors_in(launch)]
    return sum(liveness.hint_of(tensor.untyped_storage().nbytes()) for tensor in tensors)
