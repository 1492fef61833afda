"""Biases of convolutions that the Inductor of torch 2.11 cannot lower on the CPU: those that are views."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxshard import torch_private
from fxshard.ir import launches, ops


def realize(graph: fx.Graph) -> None:
    """Copy the bias of each convolution on the CPU, if this torch needs it; a gathered one is a view of a buffer."""
    mode = torch_private.fake_mode_of(graph)
    if launches.CONVOLUTION_TAKES_VIEWS or mode is None:
        return
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        bias = node.args[2]
        value = bias.meta["val"] if isinstance(bias, fx.Node) else None
        if isinstance(value, Tensor) and value.device.type == "cpu":
            with graph.inserting_before(node):
                copy = graph.call_function(ops.COPY, (bias,))
            with mode:
                copy.meta["val"] = ops.COPY(value)
            node.args = (*node.args[:2], copy, *node.args[3:])
