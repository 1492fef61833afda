"""HandOffReductions: which reductions a graph leaves on the link, what it says of the others, and the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxshard.cost.sizes import sizes_of
from fxshard.cost.timeline import Timeline
from fxshard.ir import collectives, ops, tags
from fxshard.passes._base import GraphKind, GraphPass, PassContext
from fxshard.passes.assign_streams import AssignStreams
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.hand_off_reductions import HandOffReductions
from tests.graphs import Traced, assert_changes_nothing, broken_by, mixed_precision, offloaded, two_layers
from tests.schedules import DEAR_COPIES, SCHEDULE, after_passes, assert_schedule, model_of

aten = torch.ops.aten


def handed_off(
    traced: Traced, *earlier: GraphPass, kind: GraphKind = "backward", is_part: bool = True
) -> tuple[fx.GraphModule, PassContext]:
    """The graph after the pass, of a frame that is a part of its model."""
    plan = dataclasses.replace(traced.plan, is_part=is_part)
    passes: tuple[GraphPass, ...] = (*(earlier or SCHEDULE), HandOffReductions())
    return after_passes(traced, kind, *passes, plan=plan)


def deferred(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=ops.DEFERRED_WAIT))


def test_the_reductions_of_the_last_layers_are_returned_before_they_have_arrived() -> None:
    gm, _ = handed_off(model_of("four_layers"))
    assert_schedule(gm, "hand_off_reductions_backward", whole=True)


def test_two_are_left_which_stand_behind_all_launches() -> None:
    gm, ctx = handed_off(model_of("four_layers"))
    assert [node.name for node in deferred(gm)] == ["reduced_layers_1", "reduced_layers_0"]
    assert {remark.why for remark in ctx.declined} == {
        "another reduction is launched behind its wait; it is waited for in this graph"
    }


def test_a_coalesced_launch_is_left_with_all_that_it_brings() -> None:
    gm, _ = handed_off(model_of("two_dtypes"), CoalesceCollectives(), *SCHEDULE)
    assert deferred(gm)


def test_the_last_reduction_is_left_as_one_tensor_also_where_copies_are_dear() -> None:
    traced = model_of("four_layers")
    plan = dataclasses.replace(traced.plan, is_part=True)

    def left(*, hands_off: bool) -> list[str]:
        passes = (CoalesceCollectives(hands_off=hands_off), *SCHEDULE, HandOffReductions())
        gm, _ = after_passes(traced, "backward", *passes, plan=plan, hardware=DEAR_COPIES)
        return [node.name for node in deferred(gm)]

    assert left(hands_off=False) == []
    assert left(hands_off=True) == ["reduced_layers_0"]


def whys(ctx: PassContext) -> set[str]:
    """Why reductions are waited for in the graph."""
    return {remark.why.removesuffix("; it is waited for in this graph") for remark in ctx.declined}


def test_gathers_in_bfloat16_change_nothing() -> None:
    gm, _ = handed_off(model_of("mixed_precision"))
    assert deferred(gm)


def test_what_must_be_divided_first_is_waited_for_in_the_graph() -> None:
    gm, ctx = handed_off(model_of("doubles"))
    assert (deferred(gm), whys(ctx)) == ([], {"more is computed of what it brings"})


def test_a_gradient_that_goes_to_the_host_is_waited_for() -> None:
    gm, ctx = handed_off(offloaded())
    assert (deferred(gm), whys(ctx)) == ([], {"more is computed of what it brings"})


def test_of_two_reductions_over_replicas_the_second_is_left() -> None:
    gm, ctx = handed_off(two_layers(replicas=2))
    launches = {node.all_input_nodes[0].target for node in deferred(gm)}
    assert (launches, whys(ctx)) == ({collectives.ALL_REDUCE}, {"more is computed of what it brings"})


def test_a_launch_on_a_side_stream_is_waited_for() -> None:
    gm, ctx = handed_off(model_of("mixed_precision"), *SCHEDULE, AssignStreams(mode="side"))
    for launch in collectives.reduce_launches(gm.graph):
        assert bool(tags.meta_of(launch).stream) == any("side stream" in why for why in whys(ctx))


def test_a_frame_with_the_whole_model_waits_itself() -> None:
    gm, ctx = handed_off(model_of("four_layers"), is_part=False)
    assert deferred(gm) == []
    assert_changes_nothing(HandOffReductions(), gm, ctx)


def test_a_forward_reduces_nothing() -> None:
    gm, ctx = handed_off(model_of("four_layers"), kind="forward")
    assert deferred(gm) == []
    assert_changes_nothing(HandOffReductions(), gm, ctx)


def test_changes_nothing_when_run_again() -> None:
    gm, ctx = handed_off(model_of("four_layers"))
    assert_changes_nothing(HandOffReductions(), gm, ctx)


def test_costs_count_no_time_for_what_the_graph_does_not_wait_for() -> None:
    traced = model_of("four_layers")

    def exposed(is_part: bool) -> float:
        gm, ctx = handed_off(traced, is_part=is_part)
        timing = Timeline(sizes_of(gm.graph, ctx.plan), ctx.hardware).run()
        return sum(transfer.exposed for transfer in timing.transfers.values())

    assert exposed(is_part=True) < exposed(is_part=False)


def _read_again(graph: fx.Graph) -> None:
    (node, *_) = graph.find_nodes(op="call_function", target=ops.DEFERRED_WAIT)
    with graph.inserting_after(node):
        made = graph.call_function(aten.mul.Tensor, (node, 1.0))
    made.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _one_more(graph: fx.Graph) -> None:
    graph.find_nodes(op="call_function", target=collectives.WAIT)[0].target = ops.DEFERRED_WAIT


@pytest.mark.parametrize("mistake", [_read_again, _one_more])
def test_a_wrong_hand_off_is_caught(mistake: Callable[[fx.Graph], Any]) -> None:
    traced = model_of("four_layers")
    plan = dataclasses.replace(traced.plan, is_part=True)
    gm, ctx = after_passes(traced, "backward", *SCHEDULE, plan=plan)
    assert broken_by(HandOffReductions(), mistake, gm, ctx) == "deferred_waits_are_for_results"


def test_a_gradient_that_is_cast_after_its_reduction_is_left_to_the_runtime() -> None:
    traced = mixed_precision(reduce_dtype=torch.bfloat16)
    gm, _ = handed_off(traced)
    (left,) = deferred(gm)
    assert (left.args[1], left.all_input_nodes[0].meta["val"].dtype) == (torch.float32, torch.bfloat16)
    assert not [node for node in gm.graph.nodes if node.target in ops.CASTS and node.meta["val"].ndim == 1]
