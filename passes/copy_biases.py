"""Copy biases of convolutions that Inductor cannot lower as views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from fxshard import torch_private
from fxshard.ir import ops, regions
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class CopyBiases(GraphPass):
    """Copy the bias of each convolution on the CPU: a gathered one is a view of a buffer.

    Before   %bias = view of %gathered  %y = convolution(%x, %weight, %bias)
    After    %bias = view of %gathered  %b = fxshard.copy(%bias)  %y = convolution(%x, %weight, %b)

    `needed` says whether this torch's Inductor needs it; that of 2.11 does. Regions are looked through, too.

    Numerics: unchanged. Memory: one copy of each such bias, while its convolution runs.
    No-op: newer torches; other devices; no convolution with a bias.
    Source: torch/_inductor/kernel/conv.py, which copies the bias itself in newer torches.
    """

    requires = frozenset({Property.COLLECTIVES, Property.SCHEDULED})
    reorders_only = True

    needed: bool = not torch_private.CONVOLUTION_TAKES_VIEWS

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        mode = torch_private.fake_mode_of(gm.graph)
        if not self.needed or mode is None:
            return False
        called = regions.codes_in(gm.graph)
        copied = [node for graph in (gm.graph, *(code.graph for code in called)) for node in _copied(graph, mode)]
        for code in called:
            code.recompile()
        return bool(copied)


def _copied(graph: fx.Graph, mode: Any) -> list[fx.Node]:
    copies: list[fx.Node] = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        bias = node.args[2]
        value = bias.meta["val"] if isinstance(bias, fx.Node) and bias.target is not ops.COPY else None
        if isinstance(value, Tensor) and value.device.type == "cpu":
            with graph.inserting_before(node):
                copies.append(graph.call_function(ops.COPY, (bias,)))
            with mode:
                copies[-1].meta["val"] = ops.COPY(value)
            node.args = (*node.args[:2], copies[-1], *node.args[3:])
    return copies
