"""FoldCopies: what stands between collectives and a region becomes a part of the region."""

from __future__ import annotations

import pytest
from torch import fx

from fxshard.ir import collectives, ops, regions, tags
from fxshard.ir.text import graph_text
from fxshard.passes._base import GraphKind, PassContext, Property
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.fold_copies import FoldCopies
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.pin_order import PinOrder
from tests import graphs
from tests.graphs import SPLIT, Traced, assert_changes_nothing, assert_golden, run_pass, text
from tests.schedules import DEAR_COPIES
from tests.steps import assert_same_step, step

GIVEN = (Property.COLLECTIVES, Property.LOWERED)


def folded(traced: Traced, kind: GraphKind, *more: CoalesceCollectives) -> tuple[fx.GraphModule, PassContext]:
    """The graph after the pass, with one tensor per parameter in a launch if `more` says so."""
    gm, ctx = traced.at(kind, after=InsertCollectives)
    for each in (*more, FoldCopies()):
        run_pass(each, gm, PassContext(plan=ctx.plan, kind=kind, hardware=DEAR_COPIES), given=GIVEN)
    return gm, ctx


def code_in(gm: fx.GraphModule) -> str:
    """The one graph that calls of regions call."""
    (code,) = regions.codes_in(gm.graph)
    assert code is not None
    return graph_text(code.graph)


@pytest.mark.parametrize("kind", SPLIT)
def test_moves_copies_into_the_region(kind: GraphKind) -> None:
    gm, _ = folded(graphs.regions(), kind)
    assert_golden(f"{text(gm)}\n\nWhat is called:\n{code_in(gm)}", f"fold_copies_{kind}")


@pytest.mark.parametrize("kind", SPLIT)
def test_no_copy_is_left_between_a_unit_and_its_region(kind: GraphKind) -> None:
    gm, _ = folded(graphs.regions(world_size=3), kind)  # rows do not divide: parameters are trimmed, gradients padded
    calls = gm.graph.find_nodes(op="call_function", target=regions.INVOKE)
    assert len(calls) == 2
    for call in calls:
        units = [tags.units_of(node) for node in call.all_input_nodes if collectives.is_wait(node)]
        assert len(units) == 1
    sent = [source for launch in collectives.reduce_launches(gm.graph) for source in launch.all_input_nodes]
    assert len([node for node in sent if regions.INVOKE in {source.target for source in node.all_input_nodes}]) == (
        2 if kind == "backward" else 0
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("coalesced", [False, True])
def test_computes_the_same_bits(world_size: int, coalesced: bool) -> None:
    traced = graphs.regions(world_size=world_size)
    more = (CoalesceCollectives(),) if coalesced else ()
    hardware = None if coalesced else DEAR_COPIES
    actual = step(traced, *more, FoldCopies(), hardware=hardware)
    assert_same_step(actual, step(traced, *more, hardware=hardware), rtol=0, atol=0)


def test_changes_nothing_when_run_again() -> None:
    gm, ctx = folded(graphs.regions(), "backward")
    assert_changes_nothing(FoldCopies(), gm, ctx)


def test_leaves_a_graph_without_regions_alone() -> None:
    assert_changes_nothing(FoldCopies(), *graphs.two_layers().at("forward", after=InsertCollectives))


def test_leaves_copies_on_a_side_stream_alone() -> None:
    gm, ctx = graphs.regions().at("forward", after=InsertCollectives)
    for node in gm.graph.nodes:
        if node.target in ops.MOVEMENT:
            tags.tag(node, stream=tags.COPY_OUT)
    assert not FoldCopies().apply(gm, ctx)


def test_leaves_a_copy_of_a_symbolic_size_alone() -> None:
    gm, ctx = graphs.regions().at("forward", after=InsertCollectives)
    (wait, *_) = [node for node in gm.graph.nodes if collectives.is_wait(node)]
    with gm.graph.inserting_after(wait):
        size = gm.graph.call_function(ops.aten.sym_size.int, (wait, 0))
    with gm.graph.inserting_after(size):
        gm.graph.call_function(ops.aten.view.default, (wait, [size]))
    assert FoldCopies().apply(gm, ctx)  # of the other units


def test_a_call_that_is_like_no_other_keeps_its_copies() -> None:
    gm, ctx = graphs.regions().at("forward", after=InsertCollectives)
    _, second = gm.graph.find_nodes(op="call_function", target=regions.INVOKE)
    weight = second.args[3]
    assert isinstance(weight, fx.Node)
    with gm.graph.inserting_before(second):
        again = gm.graph.call_function(ops.aten.clone.default, (weight,))
    again.meta = dict(weight.meta)
    second.replace_input_with(weight, again)
    before = text(gm)
    assert not FoldCopies().apply(gm, ctx)
    assert text(gm) == before
    assert {remark.why for remark in ctx.declined} == {"its copies are like those of no other call, and stay outside"}


def test_a_gather_that_only_regions_read_needs_no_pin() -> None:
    gm, ctx = folded(graphs.regions(), "forward")
    run_pass(PinOrder(), gm, ctx)
    pinned = {unit for node in gm.graph.nodes if tags.meta_of(node).after for unit in tags.units_of(node)}
    assert not pinned & {"layers.1", "layers.2"}
