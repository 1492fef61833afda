"""Launch what follows a reduction as soon as it has arrived: the all_reduce between replicas, the copy to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from fxshard.cost.sizes import sizes_of
from fxshard.cost.timeline import Timeline
from fxshard.ir import collectives, launch_groups, ops, tags
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class ChainReductions(GraphPass):
    """Move the wait of a reduction, and what is launched with its result, up to where it has arrived by the costs.

    Before   %r = reduce_scatter(%dw)  compute  compute  %g = wait(%r)  %a = all_reduce(%g)  %s = wait(%a)  return
    After    %r = reduce_scatter(%dw)  compute  %g = wait(%r)  %a = all_reduce(%g)  compute  %s = wait(%a)  return

    Between replicas each shard of a gradient is averaged by an all_reduce; that of an offloaded shard is copied to the
    host. Either needs what came before it, and has a link of its own, so it runs beside the compute and the reductions
    that follow. Waiting too early would keep compute waiting: costs say when the transfer is done, its launch and its
    queue being what they are now.

    Numerics: unchanged. Memory: the inputs of a reduction are free earlier.
    No-op: no replicas, nothing is offloaded; a reduction that has not arrived before it is waited for anyway.
    Source: FSDP2 `_fsdp_collectives.py` (`foreach_reduce`), which runs the all_reduce on a stream of its own.
    """

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        before = list(gm.graph.nodes)
        for targets in (collectives.ALL_REDUCES, (ops.COPY_TO_HOST,)):  # a copy may come behind an all_reduce
            launches = tags.launches_of(gm.graph, targets)
            if launches:
                launch_groups.move(_places(launches, gm.graph, ctx))
        return before != list(gm.graph.nodes)


def _places(launches: Sequence[fx.Node], graph: fx.Graph, ctx: PassContext) -> dict[fx.Node, fx.Node]:
    """Return before which node each launch goes, with what it sends and the waits for what that is made of."""
    arrivals = Timeline(sizes_of(graph, ctx.plan), ctx.hardware).arrivals()
    chained = {
        group: sorted(found)  # nodes compare by their place in the graph
        for group in map(launch_groups.group_of, launches)
        if (found := set(filter(collectives.is_wait, group.inputs)))
    }
    moving = {node for group, waits in chained.items() for node in (*waits, *group.nodes)}
    places: dict[fx.Node, fx.Node] = {}
    for group, waits in chained.items():
        arrived = [arrivals[launch_groups.waited_for(wait)] for wait in waits]
        others = [source.next for source in group.inputs.difference(waits)]
        place = launch_groups.following(max(arrived + others).prev, moving)
        hoisted = [node for node in (*waits, *group.nodes) if node > place]
        places |= dict.fromkeys(hoisted, place)
        when = "has arrived by the costs" if hoisted else "is waited for"
        ctx.note(group.launches[0], f"launched where what it sends {when}")
    return places
