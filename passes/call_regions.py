"""Make subgraphs of regions, which Inductor lowers once each."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, cast

from torch import fx
from torch.fx import GraphModule

from fxshard.ir import regions
from fxshard.passes._base import GraphPass, PassContext


@dataclass(frozen=True, kw_only=True)
class CallRegions(GraphPass):
    """Replace each call of a region by torch's call of a subgraph.

    Before   %y = region([%x, %w], 'Block')
    After    %y = invoke_subgraph(Block_forward, 'Block_forward', %x, %w)

    Graphs that are interpreted call the subgraph by a plain function, which every dispatch mode lets through.
    A call that reads a tensor with other strides than the region was traced with becomes the region's own nodes.

    Attributes:
        interpreted: whether the graph is interpreted, not compiled by Inductor.

    Numerics: unchanged. Memory: unchanged. No-op: a graph without regions.
    Source: torch/_higher_order_ops/invoke_subgraph.py; Inductor's lowering of it (torch/_inductor/ir.py).
    """

    interpreted: bool = False

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
        calls, added = [node for node in gm.graph.nodes if regions.is_call(node)], dict[GraphModule, str]()
        for call in calls:
            name, code, operands = regions.called_by(call), regions.code_of(call), regions.operands_of(call)
            assert code is not None
            places = code.graph.find_nodes(op="placeholder")
            if list(map(regions.layout_of, operands)) != list(map(regions.layout_of, places)):
                ctx.note(call, f"put in line: it reads other strides than {name} was traced with")
                _put_in_line(call, code, operands)
                continue
            if code not in added:
                added[code] = regions.add_code(gm, name, regions.copied(code))
            self._call(call, added[code], name, operands)
        return bool(calls)

    def _call(self, call: fx.Node, attribute: str, name: str, operands: list[fx.Node]) -> None:
        with call.graph.inserting_before(call):
            subgraph = call.graph.get_attr(attribute)
        call.target = regions.interpret if self.interpreted else regions.INVOKE
        call.args = (subgraph, name, *operands)
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
