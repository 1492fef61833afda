"""Let the first and the last all_gather of a graph reach over its ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from fxshard.ir import collectives, dataflow, graph_edit, launch_groups, ops, pins, tags
from fxshard.ir.dataflow import Dataflow, Flat
from fxshard.ir.tags import ShardKey
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class HandOffPrefetch(GraphPass):
    """Let a graph take over gathers that were launched before it began, and launch those of the graph after it.

    Before   %u0 = all_gather(%shard_0)  compute  %u1 = all_gather(%shard_1)  compute
    After    %u0 = fxshard.prefetched_all_gather(%shard_0, ..., 'first')  compute
             %u1 = fxshard.prefetched_all_gather(%shard_1, ..., 'last')   compute

    The op in the place of the first launch group takes what is in flight already, or launches; behind the last one it
    also launches what the first unit of the next graph will take. Which graph that is, the prefetcher has seen before:
    `runtime/prefetcher.py`, [Note: prefetch across graphs].

    Attributes:
        guess: whether to launch what came next the last time, where no list of the user says what to launch; never
            under a memory budget, which counts the launches of one graph.
        hands_over: whether to launch anything for the next graph.

    Numerics: unchanged. Memory: the launches of one unit more are in flight between two graphs.
    No-op: no all_gather; the graph reaches over its ends already.
    Source: FSDP2 `_fsdp_param_group.py` (`_prefetch_unshard`, `_backward_prefetch`).
    """

    requires = frozenset({Property.COLLECTIVES, Property.SCHEDULED})
    reorders_only = True

    guess: bool = True
    hands_over: bool = True

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        if gm.graph.find_nodes(op="call_function", target=ops.PREFETCHED_ALL_GATHER):
            return False
        guess = self.guess and ctx.unsharded_budget_bytes is None
        groups = launch_groups.groups_of(gm.graph, collectives.GATHERS)
        roles = {}
        if groups:
            roles = dict.fromkeys(groups[0].launches, "only" if len(groups) == 1 and self.hands_over else "first")
        if len(groups) > 1 and guess and self.hands_over:
            roles[groups[-1].launches[-1]] = "last"
        flow = dataflow.dataflow_of(gm.graph, ctx.plan)
        shards = tags.shards_of(gm.graph)
        changed = False
        for launch, role in roles.items():
            if not ctx.plan.in_subgroups.keys().isdisjoint(tags.units_of(launch)):
                ctx.decline(launch, "it sends what forward has kept; it is launched in this graph")
                continue
            if any(isinstance(sent, Flat) and sent.is_copy for sent in flow.sent_by(launch)):
                ctx.decline(launch, "its shard is copied from the host; it is launched in this graph")
                continue
            arguments = _arguments(launch, flow, shards)
            if arguments is None:
                ctx.decline(launch, "it sends more than parts of one flat; it is launched in this graph")
                continue
            stream = tags.meta_of(launch).stream
            made = graph_edit.replace_launch(launch, ops.PREFETCHED_ALL_GATHER, (*arguments, role, guess, stream))
            _keep_next_launch_behind(made)
            changed = True
        return changed


def _arguments(launch: fx.Node, flow: Dataflow, shards: Mapping[ShardKey, fx.Node]) -> tuple[object, ...] | None:
    """Return the flat, dtype and spans that a launch sends, and its ranks; nothing if it sends anything else."""
    sent = flow.sent_by(launch)
    flats = [value for value in sent if isinstance(value, Flat)]
    if len(flats) < len(sent) or len({(flat.unit, flat.shard, flat.dtype) for flat in flats}) != 1:
        return None
    shard = shards.get(ShardKey(flats[0].unit, flats[0].shard))
    starts, numels = [flat.start for flat in flats], [flat.numel for flat in flats]
    ranks = collectives.world_size_of(launch), collectives.group_of(launch)
    return None if shard is None else (shard, flats[0].dtype, starts, numels, *ranks)


def _keep_next_launch_behind(made: fx.Node) -> None:
    """Pin the next launch: Inductor keeps the order of the collectives that it knows, and `made` is none."""
    following = made.next
    while following.op != "output" and following.target not in collectives.LAUNCHES:
        following = following.next
    if following.op != "output":
        pins.pin(following, made)
