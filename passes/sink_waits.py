"""Wait for reductions as late as possible, so that the compute behind them runs while they are on the link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from fxshard.cost.sizes import sizes_of
from fxshard.cost.timeline import Timeline
from fxshard.errors import ConfigError
from fxshard.ir import collectives, launch_groups, ops
from fxshard.ir.launch_groups import LaunchGroup
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class SinkWaits(GraphPass):
    """Move the waits of reductions down: to the end, or to where as many buffers as allowed would be in flight.

    Before   %r1 = reduce_scatter(%dw1)  %g1 = wait(%r1)  ...  %r0 = reduce_scatter(%dw0)  %g0 = wait(%r0)  return
    After    %r1 = reduce_scatter(%dw1)  ...  %r0 = reduce_scatter(%dw0)  %g1 = wait(%r1)  %g0 = wait(%r0)  return

    `max_buffers` is how many reductions may have their inputs alive at once; the oldest is waited for before what the
    next one sends is put together. FSDP2 has one. What is made of a reduced gradient (casts, divisions, its place in
    the shard's gradient) goes with the wait.

    Where replicas hold the same shard, an all_reduce needs what the reduction gives. So a reduction is waited for as
    soon as it has arrived by the costs, which lets the all_reduce run beside the compute that follows; the all_reduces,
    whose buffers are shards, are waited for at the end. Where the gradient of an offloaded shard is copied to the host,
    the reduction is waited for before the next one begins, the copy at the end.

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
        """Edit `gm.graph` in place; return whether anything changed."""
        found = launch_groups.groups_of(gm.graph, collectives.REDUCTIONS)
        outer = launch_groups.groups_of(gm.graph, collectives.ALL_REDUCES)
        copied = gm.graph.find_nodes(op="call_function", target=ops.COPY_TO_HOST)
        last = {wait for group in outer for wait in group.waits if not _is_followed(group)}
        last.update(wait for copy in copied for wait in copy.users)
        before = list(gm.graph.nodes)
        places: dict[fx.Node, fx.Node] = dict.fromkeys(last, gm.graph.output_node())
        is_timed = outer or copied
        arrivals = Timeline(sizes_of(gm.graph, ctx.plan), ctx.hardware).arrivals() if is_timed else {}
        moving = _with_readers({wait for group in found for wait in group.waits})
        for i, group in enumerate(found):
            is_copied = _is_followed(group) and not outer
            latest, why = self._latest(found, i, gm.graph, 1 if is_copied else self.max_buffers)
            places |= dict.fromkeys(group.waits, latest)
            if _is_followed(group) and (outer or group is found[-1]):
                places |= _arrived(group, latest, arrivals, moving)
                then = "all_reduce" if outer else "copy to the host"
                why = f"waited for where it has arrived by the costs, so that its {then} can start"
            elif is_copied:
                why += ", so that its copy to the host can start"
            ctx.note(group.launches[0], why)
        for group in outer:
            until = "at the end"
            if _is_followed(group):
                launched = max(places[source] for source in group.inputs if source in places)
                found_at = _arrived(group, gm.graph.output_node(), arrivals, moving)
                places |= {wait: max(place, launched) for wait, place in found_at.items()}
                until = "where it has arrived, to be copied"
            ctx.note(group.launches[0], f"launched once the reduction is there, waited for {until}")
        for node in gm.graph.nodes:
            sunk = [places[source] for source in node.all_input_nodes if source in places]
            if sunk and node not in places and node.op != "output":
                places[node] = max(sunk)  # nodes compare by their place in the graph
                last.update({node} if not last.isdisjoint(node.all_input_nodes) else ())
        in_order = sorted(places, key=lambda node: (node in last, node))  # no all_reduce is launched behind a wait
        launch_groups.move({node: places[node] for node in in_order})
        return before != list(gm.graph.nodes)

    @staticmethod
    def _latest(found: list[LaunchGroup], i: int, graph: fx.Graph, max_buffers: int) -> tuple[fx.Node, str]:
        if i + max_buffers >= len(found):
            return graph.output_node(), "waited for at the end"
        later = found[i + max_buffers]
        why = f"waited for before {later.name} is reduced: {max_buffers} may be in flight"
        return next(node for node in later.nodes if node > found[i].nodes[-1]), why


def _is_followed(group: LaunchGroup) -> bool:
    """Whether what the launches of a group leave is averaged over replicas, or copied to the host."""
    readers = _with_readers(set(group.waits))
    return any(node.target in (*collectives.ALL_REDUCES, ops.COPY_TO_HOST) for node in readers)


def _arrived(
    group: LaunchGroup, latest: fx.Node, arrivals: Mapping[fx.Node, fx.Node], moving: set[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Return for each wait of a group the node before which its launch has arrived."""
    found = {}
    for wait in group.waits:
        (source,) = wait.all_input_nodes
        launch = source if source in arrivals else source.all_input_nodes[0]
        found[wait] = min(latest, launch_groups.following(arrivals[launch].prev, moving))
    return found


def _with_readers(nodes: set[fx.Node]) -> set[fx.Node]:
    """Return nodes, and all that reads them, but for the graph's end."""
    found, todo = set(nodes), list(nodes)
    while todo:
        for user in todo.pop().users:
            if user not in found and user.op != "output":
                found.add(user)
                todo.append(user)
    return found
