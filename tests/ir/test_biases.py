"""Convolutions whose bias is a view."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.ir import biases, launches, ops


@pytest.fixture
def graph() -> fx.Graph:
    def two(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        return torch.conv2d(torch.conv2d(x, weight, buffer[1:]), weight)

    shapes = [(1, 2, 3, 3), (2, 2, 1, 1), (3,)]
    return make_fx(two, tracing_mode="fake")(*map(torch.zeros, shapes)).graph


def copies(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=ops.COPY))


def test_the_bias_is_copied_where_this_torch_needs_it(graph: fx.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "CONVOLUTION_TAKES_VIEWS", False)
    biases.realize(graph)
    graph.lint()
    (copy,) = copies(graph)
    first, _ = graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert first.args[2] is copy
    assert copy.meta["val"].shape == (2,)


def test_other_torches_are_left_alone(graph: fx.Graph) -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert launches.CONVOLUTION_TAKES_VIEWS == (version > (2, 11))
    biases.realize(graph)
    assert bool(copies(graph)) != launches.CONVOLUTION_TAKES_VIEWS
