"""ReshardToSubgroup: what forward keeps, what backward gathers it from, and that it makes no difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from fxshard.ir import ops
from fxshard.ir.properties import GraphKind
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.reshard_to_subgroup import ReshardToSubgroup
from tests import graphs
from tests.graphs import assert_changes_nothing, assert_golden, broken_by, run_pass, text, without_subgroup_name
from tests.steps import assert_same_step, reference_step, step


def test_has_everybody_read_what_a_subgroup_shares() -> None:
    gm, ctx = graphs.in_subgroups().at("joint", after=DedupUnshard)
    assert run_pass(ReshardToSubgroup(), gm, ctx)
    assert_golden(without_subgroup_name(text(gm)), "reshard_to_subgroup_joint")
    assert_changes_nothing(ReshardToSubgroup(), gm, ctx)


def test_has_forward_read_what_it_gathers_anyway() -> None:
    gm, ctx = graphs.in_subgroups().at("forward")
    assert run_pass(ReshardToSubgroup(), gm, ctx)
    assert_golden(without_subgroup_name(text(gm)), "reshard_to_subgroup_forward")
    assert_changes_nothing(ReshardToSubgroup(), gm, ctx)


def test_has_backward_gather_over_the_subgroup() -> None:
    gm, _ = graphs.in_subgroups().at("backward", after=InsertCollectives)
    assert_golden(without_subgroup_name(text(gm)), "reshard_to_subgroup_backward")
    assert_changes_nothing(ReshardToSubgroup(), *graphs.in_subgroups().at("backward"))


@pytest.mark.parametrize("kind", ["joint", "forward", "backward"])
def test_leaves_units_alone_that_all_ranks_share(kind: GraphKind) -> None:
    gm, ctx = graphs.two_layers().at(kind)
    assert_changes_nothing(ReshardToSubgroup(), gm, ctx)


def test_keeps_once_what_is_called_twice() -> None:
    traced = graphs.called_twice(world_size=4, reshard_after_forward=2)
    forward, _ = traced.at("forward", after=InsertCollectives)
    backward, _ = traced.at("backward", after=InsertCollectives)
    assert (text(forward).count("all_gather"), text(forward).count("keep_rows")) == (2, 1)
    assert text(backward).count("all_gather") in (1, 2)
    assert_same_step(step(traced), reference_step(traced))


@pytest.mark.parametrize("build", [graphs.two_layers, graphs.uneven, graphs.scalar, graphs.two_dtypes, graphs.doubles])
def test_makes_no_difference_to_the_numbers(build: Callable[..., graphs.Traced]) -> None:
    traced, plain = (build(world_size=4, reshard_after_forward=given) for given in (2, True))
    assert_same_step(step(traced), step(plain), rtol=0.0, atol=0.0)


def test_the_verifier_names_what_is_kept_in_the_wrong_order() -> None:
    def swap(graph: fx.Graph) -> None:
        for kept in graph.find_nodes(op="call_function", target=ops.KEEP_ROWS):
            kept.args = (list(reversed(kept.all_input_nodes)), *kept.args[1:])

    gm, ctx = graphs.in_subgroups().at("joint", after=DedupUnshard)
    assert broken_by(ReshardToSubgroup(), swap, gm, ctx) == "what_a_subgroup_keeps_is_its_shard"
