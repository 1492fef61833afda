"""Make ops that run on a side stream of the nodes that are tagged with one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from fxshard.ir import collectives, dataflow, graph_edit, ops, tags
from fxshard.ir.dataflow import Flat
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class LowerStreams(GraphPass):
    """Put one op that runs on a side stream in the place of a launch and the casts before it.

    Before   %s = cast(%shard)  # stream=copy_in     %u = all_gather(%s)  # stream=copy_in
    After    %u = fxshard.all_gather_on_stream([%shard], ..., 'copy_in')

    Until here a tagged cast is a cast and a tagged launch a launch, so every pass, rule and estimate reads them as any
    other. What the ops do is in `runtime/streams.py`, [Note: side streams].

    Numerics: unchanged. Memory: unchanged. No-op: no launch is tagged with a stream, as in all modes but "side".
    Source: FSDP2 `_fsdp_param_group.py` (`all_gather_copy_in_stream`).
    """

    requires = frozenset({Property.COLLECTIVES, Property.SCHEDULED})
    reorders_only = True

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        launches = [node for node in gm.graph.nodes if node.target in collectives.LAUNCHES]
        tagged = [node for node in launches if tags.meta_of(node).stream and node.target not in _LOWERED]
        if not tagged:
            return False
        flow = dataflow.dataflow_of(gm.graph, ctx.plan)
        for launch in tagged:
            ranks = collectives.world_size_of(launch), collectives.group_of(launch), tags.meta_of(launch).stream
            if launch.target in collectives.REDUCTIONS:
                inputs, dtype = _before_casts(launch)
                operator = collectives.arguments_of(launch)["reduce_op"]
                graph_edit.replace_launch(launch, ops.REDUCE_SCATTER_ON_STREAM, (inputs, dtype, operator, *ranks))
                continue
            flats = [value for value in flow.sent_by(launch) if isinstance(value, Flat)]
            if len(flats) < len(collectives.launch_inputs(launch)):
                ctx.decline(launch, "what it sends was rewritten; it stays on the main stream")
                continue
            with gm.graph.inserting_before(launch):
                sent = [node for node in collectives.launch_inputs(launch) if node is not None]
                parts = [_part_of(tags.flat_behind(node), flat) for node, flat in zip(sent, flats, strict=True)]
            graph_edit.replace_launch(launch, ops.ALL_GATHER_ON_STREAM, (parts, flats[0].dtype, *ranks))
        return True


_LOWERED = (ops.PREFETCHED_ALL_GATHER, ops.ALL_GATHER_ON_STREAM, ops.REDUCE_SCATTER_ON_STREAM)


def _part_of(shard: fx.Node, flat: Flat) -> fx.Node:
    """Return the elements of a shard that a launch sends, not cast yet."""
    whole: Tensor = shard.meta["val"]
    if (flat.start, flat.numel) == (0, whole.numel()):
        return shard
    part = shard.graph.call_function(torch.ops.aten.slice.Tensor, (shard, 0, flat.start, flat.start + flat.numel))
    part.meta["val"] = whole[flat.start : flat.start + flat.numel]
    return part


def _before_casts(launch: fx.Node) -> tuple[list[fx.Node], torch.dtype]:
    """Return what a reduction sends, before the casts that run on its stream, and the dtype that they give it."""
    sent = [node for node in collectives.launch_inputs(launch) if node is not None]
    is_cast = {node: node.target in ops.CASTS and tags.meta_of(node).stream for node in sent}
    return [node.all_input_nodes[0] if is_cast[node] else node for node in sent], sent[0].meta["val"].dtype
