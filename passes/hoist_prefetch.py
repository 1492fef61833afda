"""Launch all_gathers ahead of need, while the units before them compute."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx
from torch.fx import GraphModule

from fxshard.cost import prefetch_depth
from fxshard.cost.sizes import sizes_of
from fxshard.cost.timeline import Timeline
from fxshard.errors import ConfigError
from fxshard.ir import collectives, dataflow, launch_groups, liveness, text
from fxshard.ir.dataflow import Window
from fxshard.ir.launch_groups import Hoist, LaunchGroup
from fxshard.ir.memory_budget import MemoryBudget
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class HoistPrefetch(GraphPass):
    """Move all_gathers up, across module boundaries, by the user's lists or by a depth.

    Before   %a0 = all_gather  %w0 = wait  compute(%w0)  %a1 = all_gather  %w1 = wait  compute(%w1)
    After    %a0 = all_gather  %a1 = all_gather  %w0 = wait  compute(%w0)  %w1 = wait  compute(%w1)

    Attributes:
        depth: how many units ahead. A unit is launched where it is that far ahead of need and the unit before can be
            resharded: never more than `depth + 1` are gathered at once, besides those that stay gathered. "auto": for
            each unit as many as it takes to hide its gather, as `cost/prefetch_depth.py` finds for `hardware`.

    A unit with a list (`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`) launches what is in it,
    in this order, right after its own wait, and nothing else; one whose list is `None` launches nothing ahead.

    Numerics: unchanged. Memory: `depth` gathered units more; never beyond the budget.
    No-op: depth=0 and no lists, or a single gather at the start.
    Limits: within one graph.
    Source: FSDP2 `_fully_shard.py` (`set_modules_to_forward_prefetch`), `_fsdp_param_group.py` (`_prefetch_unshard`).
    """

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    depth: int | Literal["auto"] = 1

    def __post_init__(self) -> None:
        if self.depth == "auto":
            return
        if isinstance(self.depth, bool) or not isinstance(self.depth, int) or self.depth < 0:
            raise ConfigError(f'prefetch must be a number of units, "off" or "auto", got {self.depth!r}.')

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        groups, before = launch_groups.groups_of(gm.graph, collectives.GATHERS), list(gm.graph.nodes)
        if not groups:
            return False
        hoist = Hoist(groups, MemoryBudget(gm.graph, ctx.unsharded_budget_bytes))
        prefetches = _earliest_of_each(self._prefetches(groups, hoist, gm.graph, ctx))
        for group, prefetch in prefetches.items():
            place, limits = hoist.earliest(group, prefetch.place)
            hoist.launch(group, place)
            ctx.note(group.launches[0], "; no earlier: ".join((prefetch.why, *limits)))
        for group in groups:
            if group not in prefetches:
                ctx.note(group.launches[0], "where it is needed: nothing launches it ahead")
        hoist.move()
        return before != list(gm.graph.nodes)

    def _prefetches(
        self, groups: Sequence[LaunchGroup], hoist: Hoist, graph: fx.Graph, ctx: PassContext
    ) -> Iterator[_Prefetch]:
        """Return what each group launches ahead: what its list names, or as many groups as the depth says."""
        needed_at = _needed_at(groups, hoist, graph, ctx)
        depths = self._depths(groups, needed_at, graph, ctx)
        for i, group in enumerate(groups):
            listed = _prefetch_list(group, ctx)
            if listed == () and self.depth:
                yield from _by_depth(i, groups, needed_at[i], depths)
            elif listed:
                behind_wait = hoist.following(group.waits[-1])
                yield from _by_list(listed, groups[i + 1 :], behind_wait, group.name)
        for unit, start in _starts_of_kept_units(groups, graph, ctx).items():
            listed = ctx.plan.units[unit].backward_prefetch or ()
            yield from _by_list(listed, groups, hoist.following(start.prev), unit or "root")

    def _depths(
        self, groups: Sequence[LaunchGroup], needed_at: Sequence[fx.Node], graph: fx.Graph, ctx: PassContext
    ) -> list[int]:
        if isinstance(self.depth, int):
            return [self.depth] * len(groups)
        timeline = Timeline(sizes_of(graph, ctx.plan), ctx.hardware)
        budget = MemoryBudget(graph, ctx.unsharded_budget_bytes)
        return prefetch_depth.depths_that_hide(groups, needed_at, timeline, budget)


@dataclass(frozen=True)
class _Prefetch:
    """A group that is launched ahead, the node before which it is to be, and why there."""

    group: LaunchGroup
    place: fx.Node
    why: str


def _earliest_of_each(prefetches: Iterable[_Prefetch]) -> dict[LaunchGroup, _Prefetch]:
    """Return of each group the prefetch that launches it first, in the order of the launches."""
    found: dict[LaunchGroup, _Prefetch] = {}
    for prefetch in sorted(prefetches, key=lambda prefetch: prefetch.place):  # nodes compare by their place
        found.setdefault(prefetch.group, prefetch)
    return found


def _needed_at(groups: Sequence[LaunchGroup], hoist: Hoist, graph: fx.Graph, ctx: PassContext) -> list[fx.Node]:
    """Return for each group the node that needs it: its wait, or where the group before can be resharded."""
    places = [hoist.following(launch_groups.last_input(graph))]
    for group, last_read in zip(groups[1:], _last_reads(groups, graph, ctx), strict=False):
        wait = group.waits[0]
        places.append(min(wait, hoist.following(last_read)) if last_read else wait)
    return places


def _last_reads(groups: Sequence[LaunchGroup], graph: fx.Graph, ctx: PassContext) -> list[fx.Node | None]:
    """Return for each group the last node that reads its parameters; none if that is the end of the graph."""
    live = liveness.liveness(graph, donated=ctx.kind == "backward")
    group_of_launch = {launch: i for i, group in enumerate(groups) for launch in group.launches}
    last_use = [0] * len(groups)
    for parameter, value in dataflow.dataflow_of(graph, ctx.plan).parameters.items():
        if isinstance(value, Window) and value.launch in group_of_launch:
            i = group_of_launch[value.launch]
            last_use[i] = max(last_use[i], *(live.storages[s].last_use for s in live.storages_of[parameter]))
    return [live.nodes[last] if 0 < last < len(live.nodes) - 1 else None for last in last_use]


def _prefetch_list(group: LaunchGroup, ctx: PassContext) -> tuple[str, ...] | None:
    """Join what the user listed for the units of a group; `()` if for none of them, then the depth counts."""
    backward = ctx.kind == "backward"
    plans = [ctx.plan.units[unit] for unit in group.units]
    lists = [plan.backward_prefetch if backward else plan.forward_prefetch for plan in plans]
    if all(listed == () for listed in lists):
        return ()
    return tuple(itertools.chain.from_iterable(listed for listed in lists if listed)) or None


def _by_depth(i: int, groups: Sequence[LaunchGroup], place: fx.Node, depths: Sequence[int]) -> Iterator[_Prefetch]:
    """Return what is launched before group `i` is needed: the groups that are at most their depth behind it."""
    if i == 0:
        yield _Prefetch(groups[0], place, "first of the graph")
    for k in range(i + 1, min(i + max(depths) + 1, len(groups))):
        if k - i <= depths[k]:
            yield _Prefetch(groups[k], place, f"{k - i} ahead, before {groups[i].name} is needed")


def _by_list(listed: Iterable[str], groups: Sequence[LaunchGroup], place: fx.Node, name: str) -> Iterator[_Prefetch]:
    """Return what the list of `name` launches: of each unit in it the first gather among `groups`."""
    for unit in listed:
        group = next((group for group in groups if unit in group.units), None)
        if group is not None:
            yield _Prefetch(group, place, f"in the list of {name}")


def _starts_of_kept_units(groups: Sequence[LaunchGroup], graph: fx.Graph, ctx: PassContext) -> dict[str, fx.Node]:
    """Map unit with a list that backward need not gather -> the first node of its backward."""
    gathered = {unit for group in groups for unit in group.units}
    kept = [unit for unit, plan in ctx.plan.units.items() if plan.backward_prefetch and unit not in gathered]
    starts: dict[str, fx.Node] = {}
    for node in graph.nodes if kept and ctx.kind == "backward" else ():
        module = text.module_of(node)
        if module is not None and (unit := ctx.plan.unit_of(module)) in kept:
            starts.setdefault(unit, node)
    return starts
