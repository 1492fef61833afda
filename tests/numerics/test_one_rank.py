"""A world of one rank, and none at all: the same code trains, with nothing to shard over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor

import fxshard
from tests.numerics.harness import (
    NUM_STEPS,
    adamw,
    check,
    check_close,
    compile_module,
    full,
    only_compile,
    only_shard,
    shard_and_compile,
    squared_error,
)
from tests.numerics.models import MLP, rows
from tests.numerics.scenarios import ONE_BLOCK, SCENARIOS


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_trains_on_one_rank() -> None:
    for prepare in (shard_and_compile, only_shard, only_compile):
        check(replace(ONE_BLOCK, prepare=prepare))


@pytest.mark.usefixtures("one_rank")
def test_trains_a_unit_of_two_graphs_on_one_rank() -> None:
    check_close(SCENARIOS["a unit of two graphs"])


def losses_of(model: nn.Module) -> list[Tensor]:
    optim = adamw(model.parameters())
    losses = []
    for step in range(NUM_STEPS):
        loss = squared_error(model, *rows()(step, 0))
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())
    return losses


def seeded_mlp() -> nn.Module:
    torch.manual_seed(0)
    return MLP()


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_trains_unsharded_without_a_process_group_and_says_so(caplog: pytest.LogCaptureFixture, lower: str) -> None:
    with caplog.at_level(logging.INFO, logger="fxshard"):
        losses = losses_of(compile_module(seeded_mlp(), options={"lower": lower}))
    torch.testing.assert_close(losses, losses_of(seeded_mlp()), rtol=1e-5, atol=1e-6)
    assert len([text for text in caplog.messages if "unsharded" in text]) == 1, caplog.messages


def test_fully_shard_makes_a_group_of_one_rank_where_there_is_none() -> None:
    model = seeded_mlp()
    fxshard.fully_shard(model)
    assert dist.get_world_size() == 1
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for ours, plain in zip(model.parameters(), seeded_mlp().parameters(), strict=True):
        torch.testing.assert_close(full(ours), plain.detach(), rtol=0.0, atol=0.0)
    dist.destroy_process_group()
