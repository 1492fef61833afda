"""The unit at the turn from forward to backward: kept where that costs nothing, and left alone where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxshard
from fxshard.testing import emulated_link
from tests.numerics.harness import FSDP2, Scenario, compare, compile_module, fxshard_system, train
from tests.numerics.models import MLP, WIDTH, rows
from tests.ranks import two_ranks

NUM_UNITS = 3


def gathers(shard: dict[str, Any] | None = None, **options: Any) -> int:
    """all_gathers of one step."""
    torch._dynamo.reset()
    with emulated_link(2) as link:
        model = MLP()
        for module in (*model.blocks, model):
            fxshard.fully_shard(module, mesh=link.mesh, **(shard or {}))
        step = compile_module(model, options={"lower": "eager", **options})
        for _ in range(2):
            link.clear()
            step(torch.randn(4, WIDTH)).sum().backward()
        found = sum(transfer.op == "all_gather" for transfer in link.transfers)
    torch._dynamo.reset()
    return found


@pytest.mark.slow
def test_auto_gathers_the_last_unit_once_per_step() -> None:
    assert gathers(prefetch=1) == 2 * NUM_UNITS - 1  # the root is kept anyway
    assert gathers(prefetch="auto") == 2 * NUM_UNITS - 2


def test_leaves_a_unit_alone_that_was_told_to_reshard() -> None:
    told = {"reshard_after_forward": True}
    assert gathers(told, prefetch="auto") == gathers(told, prefetch=1) == 2 * NUM_UNITS


def test_leaves_all_units_alone_under_a_memory_budget() -> None:
    assert gathers(prefetch="auto", memory_budget_gib=1) == 2 * NUM_UNITS - 1


def test_leaves_graphs_alone_that_are_a_part_of_the_model() -> None:
    torch._dynamo.reset()
    with emulated_link(2) as link:
        model = MLP()
        for module in (*model.blocks, model):
            fxshard.fully_shard(module, mesh=link.mesh)
        for block in model.blocks:
            block.compile(backend="fxshard", options={"prefetch": "auto", "lower": "eager"})
        model(torch.randn(4, WIDTH)).sum().backward()
        plans = [unit for frame in fxshard.explanation_of(model).frames for unit in frame.plan.units.values()]
    torch._dynamo.reset()
    assert plans
    assert all(unit.reshard_after_forward for unit in plans)


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("bucket", ["unit", "auto"])
def test_trains_the_same(bucket: str) -> None:
    scenario = Scenario(model=MLP, batch=rows())
    ours = train(scenario, fxshard_system(prefetch="auto", bucket=bucket))
    compare(ours, train(scenario, FSDP2), rtol=0.0, atol=0.0)
