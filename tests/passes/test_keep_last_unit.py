"""The unit at the turn from forward to backward: kept where that costs nothing, and left alone where not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import fxshard
from fxshard.passes.bind_markers import BindMarkers
from fxshard.passes.keep_last_unit import KeepLastUnit
from fxshard.passes.pipeline import default
from fxshard.testing import emulated_link
from tests import graphs
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


def test_says_which_unit_it_keeps() -> None:
    traced = graphs.two_layers(pipeline=default(lower="eager", prefetch="auto"))
    (note,) = traced.history.stages["dynamo"]["keep_last_unit"].notes
    assert note.node == "parameter_2"
    assert [key for key, unit in traced.plan.units.items() if not unit.reshard_after_forward] == ["layers.1"]


@pytest.mark.slow
def test_auto_gathers_the_last_unit_once_per_step() -> None:
    assert gathers(prefetch=1) == 2 * NUM_UNITS - 1  # the root is kept anyway
    assert gathers(prefetch="auto") == 2 * NUM_UNITS - 2


def test_leaves_units_alone_that_were_told_to_reshard_or_have_a_budget() -> None:
    told = {"reshard_after_forward": True}
    assert gathers(told, prefetch="auto") == gathers(told, prefetch=1) == 2 * NUM_UNITS
    assert gathers(prefetch="auto", memory_budget_gib=1) == 2 * NUM_UNITS - 1


def test_leaves_graphs_alone_that_are_a_part_of_the_model() -> None:
    gm, ctx = graphs.two_layers().at("dynamo", after=BindMarkers)
    ctx.plan = dataclasses.replace(ctx.plan, is_part=True)
    graphs.assert_changes_nothing(KeepLastUnit(), gm, ctx)
    assert ctx.plan.units["layers.1"].reshard_after_forward


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("bucket", ["unit", "auto"])
def test_trains_the_same(bucket: str) -> None:
    scenario = Scenario(model=MLP, batch=rows())
    ours = train(scenario, fxshard_system(prefetch="auto", bucket=bucket))
    compare(ours, train(scenario, FSDP2), rtol=0.0, atol=0.0)
