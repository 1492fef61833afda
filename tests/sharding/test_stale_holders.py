"""The first call refuses what would train copies of sharded parameters, or nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward

from fxshard import adopt, fully_shard
from fxshard.errors import ConfigError
from tests.numerics.harness import EAGER, compile_module, loss_on_ones, sharded_mlp
from tests.numerics.models import MLP, WIDTH

BOTH_WAYS = pytest.mark.parametrize("compiled", [True, False])


def maybe_compiled(model: nn.Module, compiled: bool) -> nn.Module:
    return compile_module(model, options=EAGER) if compiled else model


@BOTH_WAYS
def test_refuses_a_parameter_that_another_model_shares(mesh: DeviceMesh, compiled: bool) -> None:
    model, other = MLP(), nn.Linear(WIDTH, WIDTH)
    other.weight = model.head.weight
    fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match=r"tied .*: head\.weight and Linear\.weight\. Each would train a copy"):
        loss_on_ones(maybe_compiled(model, compiled))
    other.weight = nn.Parameter(other.weight.detach().clone())
    loss_on_ones(maybe_compiled(model, compiled)).backward()


def test_refuses_a_unit_that_shares_a_parameter_with_a_module_beside_it(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(ConfigError, match=r"weight and Linear\.weight.*fully_shard\(\[a, b\]\)"):
        loss_on_ones(model)


def test_lets_a_frozen_parameter_be_shared(mesh: DeviceMesh) -> None:
    model, teacher = MLP(), nn.Linear(WIDTH, WIDTH)
    teacher.weight = model.head.weight.requires_grad_(False)
    fully_shard(model, mesh=mesh)
    loss_on_ones(model).backward()


@BOTH_WAYS
def test_refuses_an_optimizer_that_was_built_before(mesh: DeviceMesh, compiled: bool) -> None:
    model = MLP()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match=r"as they were before fully_shard: .*head\.bias \(SGD\)"):
        loss_on_ones(maybe_compiled(model, compiled))
    del early
    loss_on_ones(maybe_compiled(model, compiled)).backward()


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_lets_an_optimizer_be_that_waits_for_the_garbage_collector(mesh: DeviceMesh, no_collection: None) -> None:
    model = MLP()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    early.__dict__["itself"] = early
    del early
    fully_shard(model, mesh=mesh)
    loss_on_ones(model).backward()


def test_lets_the_optimizer_of_an_adopted_model_be(mesh: DeviceMesh) -> None:
    model = MLP()
    fsdp2_fully_shard(model, mesh=mesh)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_on_ones(adopt(model)).backward()
    optim.step()


@pytest.mark.parametrize("early", [True, False])
def test_refuses_steps_in_backward_whose_hooks_would_never_run(mesh: DeviceMesh, early: bool) -> None:
    if early:
        model: nn.Module = MLP()
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        fully_shard(model, mesh=mesh)
    else:
        model = sharded_mlp(mesh)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"(?s)head\.bias.*register_post_accumulate_grad_hook"):
        loss_on_ones(model)
