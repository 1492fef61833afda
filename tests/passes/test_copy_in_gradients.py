"""CopyInGradients: one op in place of a concat, the same bits, and what stays a concat."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxshard.ir import ops
from fxshard.passes._base import PassContext, Property
from fxshard.passes.copy_in_gradients import CopyInGradients
from fxshard.passes.insert_collectives import InsertCollectives
from tests import graphs
from tests.graphs import Layers, Traced, assert_changes_nothing, assert_golden, layers_of, run_pass, text, trace
from tests.schedules import BF16, model_of
from tests.steps import assert_same_step, step

GIVEN = (Property.COLLECTIVES, Property.LOWERED)
ON_CPU = CopyInGradients(devices=("cpu",))


def copied_in(traced: Traced) -> tuple[fx.GraphModule, PassContext]:
    gm, ctx = traced.at("backward", after=InsertCollectives)
    run_pass(ON_CPU, gm, ctx, given=GIVEN)
    return gm, ctx


def test_one_op_casts_and_copies_all_gradients_of_a_launch() -> None:
    gm, _ = copied_in(model_of("mixed_precision"))
    assert_golden(text(gm), "copy_in_gradients_backward")


def test_rows_that_do_not_divide_are_padded_by_the_op() -> None:
    gm, _ = copied_in(trace(Layers(2), units=layers_of, world_size=3, mp_policy=BF16))
    assert len(gm.graph.find_nodes(op="call_function", target=ops.COPY_IN)) == 2
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("model", ["two_layers", "mixed_precision", "tied_head"])
def test_computes_the_same_bits(model: str, world_size: int) -> None:
    traced = model_of(model, world_size=world_size)
    actual = step(traced, ON_CPU)
    assert_same_step(actual, step(traced), rtol=0, atol=0)


def test_changes_nothing_when_run_again() -> None:
    assert_changes_nothing(ON_CPU, *copied_in(model_of("mixed_precision")))


def test_leaves_other_devices_alone() -> None:
    assert_changes_nothing(CopyInGradients(), *graphs.two_layers().at("backward", after=InsertCollectives))


def test_leaves_gradients_of_several_dtypes_alone_and_says_so() -> None:
    gm, ctx = model_of("mixed_precision").at("backward", after=InsertCollectives)
    concat = next(node for node in gm.graph.nodes if node.target is torch.ops.aten._chunk_cat.default)
    cast = next(node for node in concat.all_input_nodes if node.target in ops.CASTS)
    source = cast.all_input_nodes[0]
    source.meta["val"] = source.meta["val"].double()
    ON_CPU.apply(gm, ctx)
    assert concat in gm.graph.nodes
    (declined,) = ctx.declined
    assert declined.why == "its gradients have several dtypes, or are read by others on their way"
