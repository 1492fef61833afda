"""Say, before the graph is split, whether backward gathers a parameter again or keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from fxshard import torch_private
from fxshard.ir import graph_edit, ops
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class ReshardPolicy(GraphPass):
    """Tag every marker, and what merely casts or views its result, for the partitioner.

    Before   %w = unshard(%shard, 'blocks.0', 0)                        %t = permute(%w)
    After    %w = unshard(%shard, 'blocks.0', 0)  # MUST_RECOMPUTE      %t = permute(%w)  # MUST_RECOMPUTE

    `MUST_RECOMPUTE` (reshard_after_forward=True) makes backward gather again from the shard; `MUST_SAVE` keeps the
    parameter. The whole chain of casts, views and copies after a resharded marker is tagged: under autocast the
    partitioner would otherwise save a cast of every gathered weight, and nothing would be resharded. What is tagged
    leaves its region of activation checkpointing (`ac_graph_id`): a weight that two regions read is one node here, and
    the partitioner would take its transpose for the tensor between the regions, which it saves.

    Of bytes that a tensor subclass has encoded, all that is made of nothing else is tagged, too: it is the parameter.

    Numerics: unchanged. Memory: resharded units are not alive between forward and backward.
    No-op: a graph without markers, or one without backward.
    Limits: what compute makes of a parameter (a norm, a product) is an activation and may be saved.
    Source: torch's min-cut partitioner (torch/_functorch/partitioners.py) reads `node.meta["recompute"]`; DeepSpeed's
        DeepCompile tags the same way (deepspeed/compile/partitioner.py).
    """

    requires = frozenset({Property.DEDUPED})
    ensures = frozenset({Property.RESHARD_TAGGED})

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        changed, encoded = False, []
        for marker in [node for node in gm.graph.nodes if ops.is_unshard(node)]:
            key = ops.key_of(marker)
            unit = ctx.plan.units[key.unit]
            policy = CheckpointPolicy.MUST_RECOMPUTE if unit.regathers else CheckpointPolicy.MUST_SAVE
            for node in graph_edit.reshapes_of(marker) if unit.regathers else (marker,):
                changed |= _tag(node, policy)
            if unit.regathers and unit.shards[key.shard].encodes is not None:
                encoded.append(marker)
        metadata = [
            n for n in gm.graph.find_nodes(op="placeholder") if torch_private.input_index(n) in ctx.plan.metadata
        ]
        for node in graph_edit.made_of(encoded, metadata):
            changed |= _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
        return changed


def _tag(node: fx.Node, policy: CheckpointPolicy) -> bool:
    changed = node.meta.get("recompute") is not policy or "ac_graph_id" in node.meta
    node.meta["recompute"] = policy
    node.meta.pop("ac_graph_id", None)
    return changed
