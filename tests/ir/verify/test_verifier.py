"""The verifier passes graphs that look wrong and are right, and its work grows with the graph and not faster."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.hardware import BUILTIN
from fxshard.ir.verify import verifier
from fxshard.passes._base import GraphPass
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from tests import graphs
from tests.models import Doing, matrix
from tests.numerics.harness import EAGER
from tests.steps import assert_same_step, reference_step, step

WIDTH = 4


def one_gradient_for_two() -> nn.Module:
    """The gradients of two parameters are one node of the graph."""
    return Doing(lambda m, x: x @ (m.a + m.b), a=matrix(WIDTH, WIDTH), b=matrix(WIDTH, WIDTH))


def squared() -> nn.Module:
    """The gradient of the parameter is one node, added to itself."""
    return Doing(lambda m, x: x @ (m.a * m.a), a=matrix(WIDTH, WIDTH))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("model", [one_gradient_for_two, squared])
def test_lets_gradients_that_are_one_node_pass(model: Callable[[], nn.Module], world_size: int) -> None:
    torch.manual_seed(0)
    traced = graphs.trace(model(), world_size=world_size, reshard_after_forward=True)
    assert_same_step(step(traced), reference_step(traced))


@pytest.mark.parametrize("step_", [CoalesceCollectives(), BucketCollectives(size=1e-5)])
def test_sends_a_gradient_of_two_parameters_for_each(step_: GraphPass) -> None:
    """Whatever launches are made of: one node is two gradients, and each is reduced into its own slot."""
    torch.manual_seed(0)
    traced = graphs.trace(one_gradient_for_two(), reshard_after_forward=True)
    expensive = dataclasses.replace(BUILTIN["cpu"], gather_tensor_overhead=1e-9, reduce_tensor_overhead=1e-9)
    assert_same_step(step(traced, step_, hardware=expensive), reference_step(traced))


def test_tells_two_models_with_the_same_names_apart(mesh: DeviceMesh) -> None:
    models = [graphs.TwoLayers(), graphs.TwoLayers()]
    for model in models:
        for unit in graphs.layers_of(model):
            fxshard.fully_shard(unit, mesh=mesh)

    def both(x: Tensor) -> Tensor:
        return models[0](x) + models[1](x)

    torch.compile(both, backend="fxshard", options=EAGER)(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for model in models for p in model.parameters())


def instructions(work: Callable[[], object]) -> int:
    """Count the bytecode instructions that this thread runs, without those of extension modules."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def work_on(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Instructions per invariant, over all passes of a step of so many layers that are units."""
    spent: dict[str, int] = {}

    def counted(invariant: verifier.Invariant) -> Any:
        def check(subject: Any) -> Any:
            found: list[Any] = []
            spent[invariant.name] = spent.get(invariant.name, 0) + instructions(
                lambda: found.extend(invariant.check(subject))
            )
            return found

        return dataclasses.replace(invariant, check=check)

    with monkeypatch.context() as patch:
        patch.setattr(verifier, "INVARIANTS", tuple(map(counted, verifier.INVARIANTS)))
        graphs.trace(graphs.Layers(num_layers), units=graphs.layers_of)
    return spent


def test_work_is_linear_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (work_on(num_layers, monkeypatch) for num_layers in (4, 40))
    steeper = {name: many[name] / few[name] for name in few if many[name] > 12 * few[name]}
    assert not steeper, steeper
    assert sum(many.values()) > 8 * sum(few.values())  # the longer graph has not been cut short
