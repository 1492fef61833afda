"""Make subgraphs of regions, which Inductor lowers once each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx
from torch.fx import GraphModule

from fxshard.ir import ops, regions, tags
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
        parts_last: whether the calls for the last unit of a backward become the region's own nodes, too, where another
            unit's gradient is made of theirs (the embedding's of the first block's): `DeferWeightGradients` takes them
            apart to hide its reduction.

    Numerics: unchanged. Memory: unchanged. No-op: a graph without regions.
    Source: torch/_higher_order_ops/invoke_subgraph.py; Inductor's lowering of it (torch/_inductor/ir.py).
    """

    interpreted: bool = False
    parts_last: bool = False

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        calls, added = [node for node in gm.graph.nodes if regions.is_call(node)], dict[GraphModule, str]()
        parted = _calls_of_last_unit(calls) if self.parts_last and ctx.kind == "backward" else []
        for call in calls:
            name, code, operands = regions.called_by(call), regions.code_of(call), regions.operands_of(call)
            assert code is not None
            places = code.graph.find_nodes(op="placeholder")
            if list(map(regions.layout_of, operands)) != list(map(regions.layout_of, places)):
                ctx.note(call, f"put in line: it reads other strides than {name} was traced with")
                _put_in_line(call, code, operands)
                continue
            if call in parted:
                ctx.note(call, "put in line: what it computes may hide the last reduction")
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


def _calls_of_last_unit(calls: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the calls for the unit of the last one; none if no other unit's gradient comes behind it."""
    if not calls:
        return []
    last = _trained_by(calls[-1])
    markers = [node for node in calls[-1].graph.nodes if ops.is_reduce_grad(node) and node > calls[-1]]
    if all(ops.key_of(marker).unit in last for marker in markers):
        return []
    return [call for call in calls if _trained_by(call) & last]


def _trained_by(call: fx.Node) -> set[str]:
    found, todo = set[str](), list(call.users)
    for node in todo:
        if ops.is_reduce_grad(node):
            found.add(ops.key_of(node).unit)
        elif node.target is operator.getitem or node.target in ops.MOVEMENT:
            todo += node.users
    return found


def _put_in_line(call: fx.Node, code: GraphModule, operands: list[fx.Node]) -> None:
    inputs = code.graph.find_nodes(op="placeholder")
    with call.graph.inserting_before(call):
        results = call.graph.graph_copy(code.graph, dict(zip(inputs, operands, strict=True)))
    for read in list(call.users):
        assert read.target is operator.getitem
        result = cast(Any, results)[read.args[1]]
        for fqn in tags.meta_of(read).grads:
            tags.tag_grad(result, fqn)
        read.replace_all_uses_with(result)
        call.graph.erase_node(read)
    call.graph.erase_node(call)
