"""FuseGradAccumulation: matrix products that add to accumulators, and those that are left as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from fxshard.ir import ops
from fxshard.ir.variant import Variant
from fxshard.passes._base import Property
from fxshard.passes.accumulate_gradients import AccumulateGradients
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.fuse_grad_accumulation import FuseGradAccumulation
from tests import graphs
from tests.graphs import Traced, assert_golden, run_pass, text
from tests.models import Doing

GIVEN = (Property.MARKED, Property.DEDUPED)


def fused(traced: Traced, **variant: Any) -> tuple[fx.GraphModule, bool]:
    """The backward that accumulates all units, after the pass, and whether that changed it."""
    gm, ctx = traced.at("backward", after=DedupUnshard)
    which = Variant(**(variant or {"accumulates": frozenset(traced.plan.units)}))
    run_pass(AccumulateGradients(which=which), gm, ctx, given=GIVEN)
    return gm, run_pass(FuseGradAccumulation(), gm, ctx, given=GIVEN)


def products(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is ops.ADDMM_ACC]


def test_adds_products_to_accumulators() -> None:
    gm, changed = fused(graphs.two_layers())
    assert changed
    assert_golden(text(gm), "fuse_grad_accumulation")


def test_transposes_the_operands_of_a_product_whose_transpose_is_the_gradient() -> None:
    gm, changed = fused(graphs.trace(Doing(lambda m, x: torch.tanh(m.linear(x)), linear=nn.Linear(4, 6, bias=False))))
    assert changed
    (product,) = products(gm)
    accumulator, left, right = (node.meta["val"] for node in product.all_input_nodes)
    assert (left.shape[0], right.shape[1]) == tuple(accumulator.shape)
    assert left.shape[1] == right.shape[0]


@pytest.mark.parametrize("model", ["read_twice", "mixed_precision"])
def test_leaves_sums_and_casts_alone(model: str) -> None:
    traced = getattr(graphs, model)()
    gm, _ = fused(traced)
    assert not products(gm)


def test_leaves_the_last_microbatch_alone() -> None:
    traced = graphs.two_layers()
    gm, changed = fused(traced, finishes=frozenset(traced.plan.units))
    assert not changed
    assert not products(gm)


def test_the_op_adds_a_product() -> None:
    accumulator, left, right = torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5)
    expected = accumulator + left @ right
    ops.ADDMM_ACC(accumulator, left, right)
    torch.testing.assert_close(accumulator, expected)
