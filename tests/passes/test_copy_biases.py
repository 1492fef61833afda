"""CopyBiases: convolutions whose bias is a view, for torches whose Inductor cannot lower them."""

from __future__ import annotations

import inspect

from torch import fx
from torch._inductor.kernel import conv

from fxshard.ir import ops, regions
from fxshard.passes._base import GraphKind
from fxshard.passes.copy_biases import CopyBiases
from fxshard.passes.insert_collectives import InsertCollectives
from tests.graphs import assert_changes_nothing, assert_golden, convolution, run_pass
from tests.schedules import renumbered


def copied(kind: GraphKind, *, needed: bool) -> tuple[fx.GraphModule, bool]:
    gm, ctx = convolution().at(kind, after=InsertCollectives)
    return gm, run_pass(CopyBiases(needed=needed), gm, ctx)


def test_the_bias_is_copied_where_this_torch_needs_it() -> None:
    gm, changed = copied("forward", needed=True)
    assert changed
    assert_golden(renumbered(gm), "copy_biases_forward")


def test_other_torches_are_left_alone() -> None:
    gm, changed = copied("forward", needed=False)
    assert not changed
    assert not gm.graph.find_nodes(op="call_function", target=ops.COPY)


def test_no_other_convolution_is_touched() -> None:
    assert not copied("backward", needed=True)[1]


def test_the_bias_is_copied_in_a_region() -> None:
    code, ctx = convolution().at("forward", after=InsertCollectives)
    outer = fx.Graph()
    inputs = [outer.node_copy(node) for node in code.graph.find_nodes(op="placeholder")]
    call = outer.call_function(regions.INVOKE, (outer.get_attr("region"), "region", *inputs))
    call.meta["val"] = [result.meta["val"] for result in regions.results_of(code)]
    outer.output((call,))
    gm = fx.GraphModule({"region": code}, outer)
    assert CopyBiases(needed=True).apply(gm, ctx)
    assert len(gm.get_submodule("region").graph.find_nodes(op="call_function", target=ops.COPY)) == 1  # type: ignore[union-attr, operator]


def test_changes_nothing_when_run_again() -> None:
    gm, ctx = convolution().at("forward", after=InsertCollectives)
    run_pass(CopyBiases(needed=True), gm, ctx)
    assert_changes_nothing(CopyBiases(needed=True), gm, ctx)


def test_it_is_known_which_torch_needs_it() -> None:
    assert CopyBiases().needed == ("realize_input(bias)" not in inspect.getsource(conv.convolution))
