"""Start copies of offloaded shards to the device ahead of the gathers that send them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from fxshard.cost.sizes import sizes_of
from fxshard.cost.timeline import Timeline
from fxshard.ir import launch_groups, ops
from fxshard.ir.launch_groups import Hoist, LaunchGroup
from fxshard.ir.memory_budget import MemoryBudget
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class HoistCopies(GraphPass):
    """Move each copy of a shard to the device up, to where it has arrived when its gather is launched.

    Before   %c0 = copy_to_device  %s0 = wait(%c0)  all_gather(%s0)  compute  %c1 = copy_to_device  %s1 = wait(%c1) ...
    After    %c0 = copy_to_device  %c1 = copy_to_device  %s0 = wait(%c0)  all_gather(%s0)  compute  %s1 = wait(%c1) ...

    Copies go one after the other over the link between host and device. By the costs the last one ends when compute
    comes to its wait, the one before when that one begins, and so on; and each is launched at least one gather ahead,
    since costs are estimates. The wait stays with the gather, which `HoistPrefetch` has placed.

    Numerics: unchanged. Memory: the shards that are copied ahead; never beyond the budget.
    No-op: no shard is copied to the device; prefetch is off.
    Limits: within one graph: the first copy of a graph has nothing to hide it.
    Source: FSDP2 `_fsdp_param_group.py` (`all_gather_copy_in_stream`); ZeRO-Infinity (arXiv:2104.07857), prefetching.
    """

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        copies = gm.graph.find_nodes(op="call_function", target=ops.COPY_TO_DEVICE)
        groups = list(map(launch_groups.group_of, copies))
        if not groups:
            return False
        before, hoist = list(gm.graph.nodes), Hoist(groups, MemoryBudget(gm.graph, ctx.unsharded_budget_bytes))
        for group, (wanted, why) in zip(groups, self._latest(groups, hoist, gm.graph, ctx), strict=True):
            place, limits = hoist.earliest(group, wanted)
            hoist.launch(group, place)
            ctx.note(group.launches[0], "; no earlier: ".join((why, *limits)))
        hoist.move()
        return before != list(gm.graph.nodes)

    def _latest(
        self, groups: list[LaunchGroup], hoist: Hoist, graph: fx.Graph, ctx: PassContext
    ) -> list[tuple[fx.Node, str]]:
        """Return for each copy the last node before which it has to begin, and why there."""
        timeline = Timeline(sizes_of(graph, ctx.plan), ctx.hardware)
        first, begins = hoist.following(launch_groups.last_input(graph)), math.inf
        found: list[tuple[fx.Node, str]] = []
        for group, earlier in zip(reversed(groups), [*reversed(groups[:-1]), None], strict=True):
            (copy,), (wait,) = group.launches, group.waits
            begins = min(begins, timeline.computed_before(wait)) - timeline.seconds[copy]
            place, why = hoist.following(timeline.last_before(begins).prev), "to have arrived by the costs"
            one_ahead = hoist.following(earlier.waits[0].prev) if earlier is not None else first
            if one_ahead < place:  # nodes compare by their place in the graph
                place, why = one_ahead, "one gather ahead" if earlier is not None else "first of the graph"
            found.append((max(place, first), why))
        return found[::-1]
