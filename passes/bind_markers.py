"""Say of each read of a parameter which unit and call it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx import GraphModule

from fxshard.errors import UnsupportedGraph
from fxshard.ir import ops, spans
from fxshard.ir.ops import MarkerKey
from fxshard.ir.plan import FramePlan, ParameterKey
from fxshard.passes._base import GraphPass, PassContext, Property

_READS = (torch.ops.fxshard.parameter, ops.PARAMETER)


def reads_of(gm: GraphModule, plan: FramePlan) -> dict[fx.Node, ParameterKey]:
    """Map each read in Dynamo's graph, and in the subgraphs of higher-order ops, to the parameter that it is of."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    # A subgraph's input is the same fake tensor as the outer input that Dynamo lifted into it.
    shards = {id(placeholders[i].meta["example_value"]): shard for i, shard in plan.shard_inputs.items()}
    found: dict[fx.Node, ParameterKey] = {}
    modules = (module for module in gm.modules() if isinstance(module, GraphModule))
    for read in (node for module in modules for node in module.graph.nodes if node.target in _READS):
        flat = read.args[0]
        shard = shards.get(id(flat.meta.get("example_value"))) if isinstance(flat, fx.Node) else None
        if shard is None:
            raise UnsupportedGraph(
                f"%{read.name} reads a parameter through {flat}, which is not an input of the captured graph. "
                "Read the parameter outside of the function that transforms it (vmap, cond, custom autograd)."
            )
        _, slot, *_ = ops.marker_arguments(str(read.args[1]))
        found[read] = (*shard, slot)
    return found


@dataclass(frozen=True, kw_only=True)
class BindMarkers(GraphPass):
    """Turn each read into a marker with the key of its unit and call: [Note: markers] in `ir/ops.py`.

    Before   %w = parameter(%flat, '0|4 4|float32|...')
    After    %w = unshard(%shard_layers_0, 'layers.0#0@0', 0, [4, 4], f32)

    Numerics: unchanged. Memory: unchanged. No-op: nothing is read, or a variant is compiled of a bound graph.
    """

    ensures = frozenset({Property.MARKED})
    changes_signature = True  # names of inputs

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
        calls: dict[tuple[str, str], int] = {}
        reads = reads_of(gm, ctx.plan)
        for read, (unit, shard, _) in reads.items():
            call, _ = spans.call_of(read) or ("", "")
            numbered = calls.setdefault((unit, call), sum(u == unit for u, _ in calls))
            _, *rest = ops.marker_arguments(str(read.args[1]))
            read.target = ops.UNSHARD
            read.args = (read.args[0], str(MarkerKey(unit, shard, str(numbered))), *rest)
        for module in gm.modules():
            if isinstance(module, GraphModule) and module is not gm:
                module.recompile()
        return bool(reads)
