"""A backward after its parameters were changed is refused, however they were changed: it would gather new values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fxshard import fully_shard
from fxshard.errors import UnsupportedGraph
from tests.numerics.harness import EAGER, compile_module, loss_on_ones, sharded_mlp
from tests.numerics.models import MLP, WIDTH
from tests.pairwise import each_once

STALE = "were changed between forward and backward"
Change = Callable[[nn.Module], object]


def stepped(**flags: Any) -> Change:
    def step(model: nn.Module) -> None:
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, **flags)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optim.step()

    return step


def stepped_in_a_compiled_function(model: nn.Module) -> None:
    optim = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    cast(Any, torch.compile)(lambda: optim.step(), backend="aot_eager")()


def stepped_by_an_optimizer_of_the_users(model: nn.Module) -> None:
    class Lion(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                torch._foreach_add_([p.data for p in group["params"]], 1.0)

    Lion(model.parameters()).step()


@torch.no_grad()
def written_locally(model: nn.Module) -> None:
    for parameter in model.parameters():
        cast(DTensor, parameter).to_local().mul_(2)


@torch.no_grad()
def written(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(2)


def loaded(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict())


CHANGES = {
    "foreach": stepped(foreach=True),
    "fused": stepped(fused=True),
    "one by one": stepped(foreach=False),
    "compiled": stepped_in_a_compiled_function,
    "the user's": stepped_by_an_optimizer_of_the_users,
    "local": written_locally,
    "written": written,
    "loaded": loaded,
}


@each_once(change=CHANGES, compiled=[False, True])
def test_refuses_a_backward_after_parameters_were(change: str, compiled: bool, mesh: DeviceMesh) -> None:
    model = sharded_mlp(mesh)
    run = compile_module(model, options=EAGER) if compiled else model
    loss_on_ones(run).backward()
    stale = loss_on_ones(run)
    CHANGES[change](model)
    with pytest.raises(UnsupportedGraph, match=STALE):
        stale.backward()
    model.zero_grad()
    loss_on_ones(run).backward()


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_refuses_a_backward_that_would_compute_a_block_again_with_new_parameters(
    reshard_after_forward: bool, mesh: DeviceMesh
) -> None:
    block = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh, reshard_after_forward=reshard_after_forward)
    block.compile(backend="fxshard", options=EAGER)
    stale = checkpoint(block, torch.ones(2, WIDTH), use_reentrant=False).square().mean()
    written(block)
    with pytest.raises(UnsupportedGraph, match=STALE):
        stale.backward()
    checkpoint(block, torch.ones(2, WIDTH), use_reentrant=False).square().mean().backward()


def test_an_optimizer_of_other_parameters_may_step_between_forward_and_backward(mesh: DeviceMesh) -> None:
    model, other = sharded_mlp(mesh), nn.Linear(2, 2)
    run = compile_module(model, options=EAGER)
    loss = loss_on_ones(run)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(other.parameters(), foreach=True).step()
    loss.backward()


def test_a_compiled_step_breaks_nowhere_for_our_sake(mesh: DeviceMesh) -> None:
    def breaks_of(parameters: list[nn.Parameter]) -> int:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optim = torch.optim.SGD(parameters, lr=0.1, foreach=True)
        torch._dynamo.reset()
        return int(torch._dynamo.explain(lambda: optim.step())().graph_break_count)

    plain = breaks_of(list(MLP().parameters()))
    model = sharded_mlp(mesh)
    loss_on_ones(compile_module(model, options=EAGER)).backward()
    assert breaks_of(list(model.parameters())) == plain
