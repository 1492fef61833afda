"""Parameters that a caller passes in place of sharded ones: leaves take their place, computed ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from fxshard.errors import ConfigError, UnsupportedGraph
from tests.numerics.harness import EAGER, compile_module, sharded_mlp
from tests.numerics.models import MLP, WIDTH

COMPUTED = r"(?s)head.weight is sharded.*was computed \(MulBackward0.*not sharded"


def scaled(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter * 1.5 for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("compiled", [False, True])
def test_refuses_parameters_that_were_computed(compiled: bool, mesh: DeviceMesh) -> None:
    model = sharded_mlp(mesh)
    run = compile_module(model, options=EAGER) if compiled else model
    with pytest.raises(ConfigError, match=COMPUTED):
        functional_call(run, scaled(run), (torch.ones(2, WIDTH),))
    run(torch.ones(2, WIDTH)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_refuses_computed_parameters_of_blocks_that_are_compiled_alone(mesh: DeviceMesh) -> None:
    model = sharded_mlp(mesh)
    for block in cast(MLP, model).blocks:
        block.compile(backend="fxshard", options=EAGER)
    with pytest.raises(ConfigError, match=COMPUTED):
        functional_call(model, scaled(model), (torch.ones(2, WIDTH),))


@pytest.mark.parametrize("values_of", [scaled, lambda model: dict(model.named_parameters())])
def test_refuses_parameters_that_are_replaced_inside_of_a_compiled_function(
    values_of: Callable[[nn.Module], Any], mesh: DeviceMesh
) -> None:
    model = sharded_mlp(mesh)
    values = values_of(model)

    def step(x: Tensor) -> Any:
        return functional_call(model, values, (x,))

    compiled = cast(Any, torch.compile)(step, backend="fxshard", options=EAGER)
    with pytest.raises(UnsupportedGraph, match=r"replaces parameters of sharded modules: .*blocks.0.*functional_call"):
        compiled(torch.ones(2, WIDTH))


@pytest.mark.parametrize("compiled", [False, True])
def test_gives_leaves_that_stand_in_for_parameters_their_gradients(compiled: bool, mesh: DeviceMesh) -> None:
    model = sharded_mlp(mesh)
    run = compile_module(model, options=EAGER) if compiled else model
    leaves = {name: p.detach().clone().requires_grad_() for name, p in run.named_parameters()}
    functional_call(run, leaves, (torch.ones(2, WIDTH),)).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves.values())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_read_after_the_call_gives_what_the_model_has_again(compiled: bool, mesh: DeviceMesh) -> None:
    model = cast(MLP, sharded_mlp(mesh))
    run = compile_module(model, options=EAGER) if compiled else model
    run(torch.ones(2, WIDTH))
    assert not isinstance(model.head.weight, DTensor), "a root is unsharded after its forward"
    functional_call(run, {n: p.detach() * 0.5 for n, p in run.named_parameters()}, (torch.ones(2, WIDTH),))
    assert model.head.weight is model.get_parameter("head.weight")
    run(torch.ones(2, WIDTH))
    assert not isinstance(model.head.weight, DTensor)
