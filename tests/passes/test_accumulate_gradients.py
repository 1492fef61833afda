"""AccumulateGradients: the backward that keeps its gradients, the one that adds what was kept, and what both become."""

from __future__ import annotations

import pytest
from torch import fx

from fxshard.ir import collectives
from fxshard.ir.variant import PLAIN, Variant
from fxshard.passes._base import PassContext, Property
from fxshard.passes.accumulate_gradients import AccumulateGradients
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.insert_collectives import InsertCollectives
from tests import graphs
from tests.graphs import Traced, assert_golden, run_pass, text
from tests.schedules import mixed_layers

LAYERS = frozenset({"layers.0", "layers.1"})
ACCUMULATE, FINAL = Variant(accumulates=LAYERS), Variant(finishes=LAYERS)
VARIANTS = {"accumulate": ACCUMULATE, "final": FINAL}


def accumulated(traced: Traced, which: Variant) -> tuple[fx.GraphModule, PassContext]:
    gm, ctx = traced.at("backward", after=DedupUnshard)
    changed = run_pass(AccumulateGradients(which=which), gm, ctx, given=(Property.MARKED, Property.DEDUPED))
    assert changed == (which != PLAIN)
    return gm, ctx


@pytest.mark.parametrize("name", VARIANTS)
def test_gives_each_gradient_an_accumulator(name: str) -> None:
    gm, _ = accumulated(graphs.two_layers(), VARIANTS[name])
    assert_golden(text(gm), f"accumulate_gradients_{name}")


@pytest.mark.parametrize("name", VARIANTS)
def test_is_followed_by_collectives_as_any_backward(name: str) -> None:
    gm, ctx = accumulated(graphs.two_layers(), VARIANTS[name])
    run_pass(InsertCollectives(), gm, ctx)
    assert_golden(text(gm), f"accumulate_gradients_{name}_inserted")


def test_reduces_nothing_where_it_accumulates_and_as_often_as_before_where_it_finishes() -> None:
    launches = []
    for which in (PLAIN, ACCUMULATE, FINAL):
        gm, ctx = accumulated(graphs.two_layers(), which)
        run_pass(InsertCollectives(), gm, ctx)
        launches.append(len(collectives.reduce_launches(gm.graph)))
    assert launches == [2, 0, 2]


def test_leaves_the_plain_backward_as_it_is() -> None:
    traced = graphs.two_layers()
    before, _ = traced.at("backward", after=DedupUnshard)
    assert text(accumulated(traced, PLAIN)[0]) == text(before)


def test_accumulates_one_unit_and_reduces_another() -> None:
    which = Variant(accumulates=frozenset({"layers.0"}), finishes=frozenset({"layers.1"}))
    gm, ctx = accumulated(graphs.two_layers(), which)
    run_pass(InsertCollectives(), gm, ctx)
    assert_golden(text(gm), "accumulate_gradients_mixed_inserted")
    assert which.name(LAYERS) == "mixed"


def test_adds_up_in_the_reduce_dtype() -> None:
    units = frozenset({"layers.0", "layers.1", "layers.2"})
    gm, _ = accumulated(mixed_layers(), Variant(accumulates=units))
    inputs = [node for node in gm.graph.find_nodes(op="placeholder") if node.name.startswith("acc_")]
    assert {str(node.meta["val"].dtype) for node in inputs} == {"torch.float32"}


def test_adds_up_the_gradients_of_one_microbatch_first() -> None:
    units = frozenset({""})
    gm, _ = accumulated(graphs.read_twice(), Variant(accumulates=units))
    assert_golden(text(gm), "accumulate_gradients_read_twice")
