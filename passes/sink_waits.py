"""Wait for reductions as late as possible, so that the compute behind them runs while they are on the link."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from fxshard.errors import ConfigError
from fxshard.ir import collectives, launch_groups
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class SinkWaits(GraphPass):
    """Move the waits of reductions down: to the end, or to where as many buffers as allowed would be in flight.

    Before   %r1 = reduce_scatter(%dw1)  %g1 = wait(%r1)  ...  %r0 = reduce_scatter(%dw0)  %g0 = wait(%r0)  return
    After    %r1 = reduce_scatter(%dw1)  ...  %r0 = reduce_scatter(%dw0)  %g1 = wait(%r1)  %g0 = wait(%r0)  return

    `max_buffers` is how many reductions may have their inputs alive at once; the oldest is waited for before what the
    next one sends is put together. FSDP2 has one. What is made of a reduced gradient (casts, divisions, its place in
    the shard's gradient) goes with the wait. What is launched then, an all_reduce between replicas or a copy to the
    host, is waited for at the end; `ChainReductions` launches it earlier.

    Numerics: unchanged. Memory: the inputs of `max_buffers` reductions, each as large as a unit's unsharded gradients.
    No-op: a graph without reductions, or where nothing stands between a wait and the end.
    Source: FSDP2 `_fsdp_param_group.py` (`reduce_scatter_state`), which lets one reduction run beside the compute.
    """

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    max_buffers: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.max_buffers, bool) or not isinstance(self.max_buffers, int) or self.max_buffers < 1:
            raise ConfigError(f"reduce_scatter_max_input_buffers must be a positive int, got {self.max_buffers!r}.")

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        before, end = list(gm.graph.nodes), gm.graph.output_node()
        places: dict[fx.Node, fx.Node] = {}
        groups = launch_groups.groups_of(gm.graph, collectives.REDUCTIONS)
        for i, group in enumerate(groups):
            latest, why = end, "waited for at the end"
            if i + self.max_buffers < len(groups):
                later = groups[i + self.max_buffers]
                latest = next(node for node in later.nodes if node > group.nodes[-1])
                why = f"waited for before {later.name} is reduced: {self.max_buffers} may be in flight"
            places |= dict.fromkeys(group.waits, latest)
            ctx.note(group.launches[0], why)
        waits_behind = dict.fromkeys(places, 0)  # node that moves -> how many launches it comes after, one by one
        for node in gm.graph.nodes:
            sunk = [source for source in node.all_input_nodes if source in places]
            if sunk and node not in places and node is not end:
                is_wait = collectives.is_wait(node)
                places[node] = end if is_wait else max(places[source] for source in sunk)  # nodes compare by place
                waits_behind[node] = max(waits_behind[source] for source in sunk) + is_wait
        # At one place nothing is waited for before all that can be launched is.
        in_order = sorted(places, key=lambda node: (waits_behind[node], node))
        launch_groups.move({node: places[node] for node in in_order})
        return before != list(gm.graph.nodes)
