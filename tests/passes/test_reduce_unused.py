"""ReduceUnused: backward reads all of a unit, and what has no gradient has zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fxshard.ir import collectives, ops
from fxshard.passes import pipeline
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.reduce_unused import ReduceUnused
from tests import graphs
from tests.graphs import Traced, assert_changes_nothing, assert_golden, run_pass, text
from tests.models import Doing, matrix
from tests.mutation.cases import in_step, partly_used, reduce_unused
from tests.steps import step


def test_gives_zeros_to_what_has_no_gradient() -> None:
    gm, ctx = in_step().at("joint", after=DedupUnshard)
    assert run_pass(ReduceUnused(), gm, ctx)
    assert_golden(text(gm), "reduce_unused_joint")


def test_backward_gathers_and_reduces_the_whole_unit() -> None:
    gm, _ = in_step().at("backward", after=InsertCollectives)
    assert_golden(text(gm), "reduce_unused_inserted_backward")


def test_a_unit_that_is_kept_is_not_gathered_again() -> None:
    gm, _ = in_step(reshard_after_forward=False).at("backward", after=InsertCollectives)
    assert gm.graph.find_nodes(op="call_function", target=ops.ZERO_GRADIENT) == []
    assert [collectives.is_launch(node) for node in gm.graph.nodes].count(True) == 1
    assert "%reduce_root: f32[6] = c10d.reduce_scatter_tensor" in text(gm)


@pytest.mark.parametrize("on", [False, True])
def test_gathers_in_backward_what_it_does_not_read_there(on: bool) -> None:
    """Another rank's graph may read it."""
    norm = Doing(lambda m, x: x * m.weight, weight=matrix(graphs.WIDTH))  # backward reads no parameter
    traced = graphs.trace(norm, then=reduce_unused if on else (lambda unit: None), reshard_after_forward=True)
    gm, _ = traced.at("backward", after=InsertCollectives)
    assert len(collectives.unshard_launches(gm.graph)) == on


@pytest.mark.parametrize("unit", [graphs.called_twice, graphs.two_layers, graphs.in_subgroups, graphs.offloaded])
def test_gives_the_same_gradients_where_all_is_used(unit: Callable[..., Traced]) -> None:
    ours, without = step(unit(then=reduce_unused)), step(unit())
    assert ours.grads.keys() == without.grads.keys()
    assert all(torch.equal(grad, without.grads[fqn]) for fqn, grad in ours.grads.items())


def test_gives_zeros_where_no_rank_has_a_gradient() -> None:
    ours, without = step(in_step()), step(partly_used())
    assert not ours.grads["unused"].any()
    assert all(torch.equal(grad, ours.grads[fqn]) for fqn, grad in without.grads.items())


@pytest.mark.parametrize("unit", [partly_used, graphs.two_layers])
def test_changes_nothing_without_the_mode(unit: Callable[..., Traced]) -> None:
    assert_changes_nothing(ReduceUnused(), *unit().at("joint", after=DedupUnshard))


@pytest.mark.parametrize("keeps", [False, True])
def test_changes_nothing_when_run_again(keeps: bool) -> None:
    gm, ctx = in_step(reshard_after_forward=not keeps).at("joint", after=DedupUnshard)
    run_pass(ReduceUnused(), gm, ctx)
    assert_changes_nothing(ReduceUnused(), gm, ctx)


def test_launches_depend_on_no_cost_of_one_graph() -> None:
    passes = pipeline.in_step(pipeline.default(bucket="auto", prefetch="auto").split)
    assert HoistPrefetch(depth=1) in passes
    assert not any(isinstance(step, CoalesceCollectives) for step in passes)
