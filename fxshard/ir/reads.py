"""What Dynamo's graph reads of parameters, before its markers know their units."""

from __future__ import annotations

import torch
from torch import fx

from fxshard.errors import UnsupportedGraph
from fxshard.ir import ops
from fxshard.ir.plan import FramePlan, ParameterKey

_READS = (torch.ops.fxshard.parameter, ops.PARAMETER)


def reads_of(gm: fx.GraphModule, plan: FramePlan) -> dict[fx.Node, ParameterKey]:
    """Map each read in Dynamo's graph, and in the subgraphs of higher-order ops, to the parameter that it is of."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    # A subgraph's input is the same fake tensor as the outer input that Dynamo lifted into it.
    shards = {id(placeholders[i].meta["example_value"]): shard for i, shard in plan.shard_inputs.items()}
    found: dict[fx.Node, ParameterKey] = {}
    modules = (module for module in gm.modules() if isinstance(module, fx.GraphModule))
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


def parameters_of(read: fx.Node) -> list[fx.Node]:
    """Return the nodes that are the parameter to the user's code: the read, or what makes the parameter of it."""
    return [n for n in read.users if n.target in (torch.ops.fxshard.whole, ops.WHOLE) or makes_parameter(n)] or [read]


def makes_parameter(node: fx.Node) -> bool:
    """Return whether a node makes a parameter with hooks of gathered bytes; see [Note: extensions]."""
    return hasattr(node.target, "makes_parameter")
