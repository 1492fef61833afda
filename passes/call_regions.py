"""Make subgraphs of regions, which Inductor lowers once each."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, cast

from torch import fx
from torch.fx import GraphModule

from fxshard.ir import ops, regions
from fxshard.passes._base import GraphPass, PassContext


@dataclass(frozen=True, kw_only=True)
class CallRegions(GraphPass):
    """Replace each call of a region by torch's call of a subgraph.

    Before   %y = region([%x, %w], 'Block')
    After    %y = invoke_subgraph(Block_forward, 'Block_forward', %x, %w)

    A call that reads a tensor with other strides than the region was traced with becomes the region's own nodes.

    Numerics: unchanged. Memory: unchanged. No-op: a graph without regions.
    Source: torch/_higher_order_ops/invoke_subgraph.py; Inductor's lowering of it (torch/_inductor/ir.py).
    """

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
        calls = [node for node in gm.graph.nodes if regions.is_call(node)]
        for call in calls:
            region = regions.region_of(call)
            is_forward = call.target is ops.REGION
            code = region.forward if is_forward else region.backward
            assert code is not None
            name = f"{region.label}_{'forward' if is_forward else 'backward'}"
            operands = list(call.args[0])
            if [_layout(node) for node in operands] == [
                _layout(node) for node in code.graph.find_nodes(op="placeholder")
            ]:
                _call(gm, call, name, code, operands)
            else:
                ctx.note(call, f"put in line: it reads other strides than {name} was traced with")
                _put_in_line(call, code, operands)
        return bool(calls)


def _layout(node: fx.Node) -> tuple[object, ...]:
    value = node.meta["val"]
    return tuple(value.shape), tuple(value.stride()), value.dtype


def _call(gm: GraphModule, call: fx.Node, name: str, code: GraphModule, operands: list[fx.Node]) -> None:
    if not hasattr(gm, name):
        gm.add_submodule(name, regions.copied(code))
    with gm.graph.inserting_before(call):
        subgraph = gm.graph.get_attr(name)
    call.target, call.args = regions.INVOKE, (subgraph, name, *operands)
    call.meta.pop("eager_input_vals", None)  # the strides to keep are those of the present operands


def _put_in_line(call: fx.Node, code: GraphModule, operands: list[fx.Node]) -> None:
    inputs = code.graph.find_nodes(op="placeholder")
    with call.graph.inserting_before(call):
        results = call.graph.graph_copy(code.graph, dict(zip(inputs, operands, strict=True)))
    for read in list(call.users):
        assert read.target is operator.getitem
        read.replace_all_uses_with(cast(Any, results)[read.args[1]])
        call.graph.erase_node(read)
    call.graph.erase_node(call)
