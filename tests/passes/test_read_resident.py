"""ReadResident: parameters that come in, and gathers that are gone."""

from __future__ import annotations

import pytest
from torch import fx

from fxshard.ir import collectives, liveness, tags
from fxshard.ir.variant import PLAIN, Variant
from fxshard.passes._base import GraphKind, PassContext, Property
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.read_resident import ReadResident
from tests import graphs
from tests.graphs import Traced, assert_golden, run_pass, text
from tests.models import Doing, matrix

FIRST = Variant(resident=frozenset({"layers.0"}))
ALL = Variant(resident=frozenset({"layers.0", "layers.1"}))


def resident(traced: Traced, kind: GraphKind, which: Variant = ALL) -> tuple[fx.GraphModule, PassContext]:
    gm, ctx = traced.at(kind, after=DedupUnshard)
    changed = run_pass(ReadResident(which=which), gm, ctx, given=(Property.MARKED, Property.DEDUPED))
    assert changed == (which != PLAIN)
    return gm, ctx


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_waits_for_an_input_in_place_of_a_gather(kind: GraphKind) -> None:
    gm, ctx = resident(graphs.two_layers(), kind)
    run_pass(InsertCollectives(), gm, ctx)
    assert_golden(text(gm), f"read_resident_{kind}")
    assert not collectives.unshard_launches(gm.graph)


def test_gathers_the_units_that_are_not_resident() -> None:
    gm, ctx = resident(graphs.two_layers(), "forward", FIRST)
    run_pass(InsertCollectives(), gm, ctx)
    run_pass(HoistPrefetch(), gm, ctx)
    assert_golden(text(gm), "read_resident_of_one_unit")
    (launch,) = collectives.unshard_launches(gm.graph)
    assert list(tags.units_of(launch)) == ["layers.1"]


def test_reads_one_input_in_all_calls_of_a_unit() -> None:
    traced = graphs.called_twice()
    gm, _ = resident(traced, "forward", Variant(resident=frozenset(traced.plan.units)))
    inputs = [node for node in gm.graph.find_nodes(op="placeholder") if tags.meta_of(node).resident]
    names = [tags.meta_of(node).resident for node in inputs]
    assert len(names) == len(set(names)) > 0


def test_copies_a_result_that_is_a_view_of_an_input() -> None:
    traced = graphs.trace(Doing(lambda m, x: m.weight.t()[1:], weight=matrix(graphs.WIDTH, graphs.WIDTH)))
    gm, ctx = resident(traced, "forward", Variant(resident=frozenset(traced.plan.units)))
    run_pass(InsertCollectives(), gm, ctx)
    assert_golden(text(gm), "read_resident_copies")


def test_counts_what_is_resident_as_unsharded_from_the_first_node_to_the_last() -> None:
    gm, ctx = resident(graphs.two_layers(), "backward")
    run_pass(InsertCollectives(), gm, ctx)
    (used, *others) = {bytes_ for _, bytes_ in liveness.unsharded_bytes(gm.graph)}
    assert used > 0
    assert not others


def test_leaves_a_graph_alone_of_which_nothing_is_resident() -> None:
    traced = graphs.two_layers()
    before, _ = traced.at("forward", after=DedupUnshard)
    assert text(resident(traced, "forward", PLAIN)[0]) == text(before)
