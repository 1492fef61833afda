"""Graphs that look wrong and are right: the verifier lets them pass, and the step equals the unsharded one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.cost.hardware import BUILTIN
from fxshard.passes._base import GraphPass
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from tests import graphs
from tests.numerics.harness import EAGER
from tests.steps import assert_same_step, reference_step, step

WIDTH = 4


class OneGradientForTwo(nn.Module):
    """The gradients of two parameters are one node of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a + self.b)


class Squared(nn.Module):
    """The gradient of the parameter is one node, added to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a * self.a)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("model", [OneGradientForTwo, Squared])
def test_lets_gradients_that_are_one_node_pass(model: type[nn.Module], world_size: int) -> None:
    torch.manual_seed(0)
    traced = graphs.trace(model(), world_size=world_size, reshard_after_forward=True)
    assert_same_step(step(traced), reference_step(traced))


@pytest.mark.parametrize("step_", [CoalesceCollectives(), BucketCollectives(size=1e-5)])
def test_sends_a_gradient_of_two_parameters_for_each(step_: GraphPass) -> None:
    """Whatever launches are made of: one node is two gradients, and each is reduced into its own slot."""
    torch.manual_seed(0)
    traced = graphs.trace(OneGradientForTwo(), reshard_after_forward=True)
    expensive = dataclasses.replace(BUILTIN["cpu"], gather_tensor_overhead=1e-9, reduce_tensor_overhead=1e-9)
    assert_same_step(step(traced, step_, hardware=expensive), reference_step(traced))


def test_tells_two_models_with_the_same_names_apart(mesh: DeviceMesh) -> None:
    models = [graphs.TwoLayers(), graphs.TwoLayers()]
    for model in models:
        for unit in graphs.layers_of(model):
            fxshard.fully_shard(unit, mesh=mesh)

    def both(x: Tensor) -> Tensor:
        y: Tensor = models[0](x) + models[1](x)
        return y

    torch.compile(both, backend="fxshard", options=EAGER)(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for model in models for p in model.parameters())
