"""LowerStreams: tagged launches become ops with their casts; nothing else moves, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxshard.ir import collectives, launches, ops, tags
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.assign_streams import AssignStreams
from fxshard.passes.hand_off_prefetch import HandOffPrefetch
from fxshard.passes.lower_streams import LowerStreams
from tests.graphs import EVERY_UNIT, SPLIT, Traced, assert_changes_nothing, broken_by, run_pass
from tests.schedules import DEAR_COPIES, MODELS, SCHEDULED, after_passes, assert_schedule, model_of
from tests.steps import assert_same_step, step

SCHEDULE = SCHEDULED["coalesced"]


def lowered(model: str, kind: GraphKind, mode: str = "side") -> tuple[fx.GraphModule, PassContext]:
    return after_passes(
        model_of(model), kind, *SCHEDULE, AssignStreams(mode=mode), LowerStreams(), hardware=DEAR_COPIES
    )


@pytest.mark.parametrize("kind", SPLIT)
def test_tagged_launches_become_ops_with_their_casts(kind: GraphKind) -> None:
    gm, _ = lowered("mixed_precision", kind)
    assert_schedule(gm, f"lower_streams_{kind}", whole=True)


@pytest.mark.parametrize("mode", ["nccl", "off"])
@pytest.mark.parametrize("kind", SPLIT)
def test_changes_nothing_where_no_stream_is_assigned(mode: str, kind: GraphKind) -> None:
    gm, ctx = after_passes(model_of("mixed_precision"), kind, *SCHEDULE, AssignStreams(mode=mode))
    assert_changes_nothing(LowerStreams(), gm, ctx)


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("model", MODELS)
def test_changes_nothing_when_run_again(model: str, kind: GraphKind) -> None:
    gm, ctx = lowered(model, kind)
    assert_changes_nothing(LowerStreams(), gm, ctx)


def test_leaves_to_the_cache_what_it_launches() -> None:
    gm, ctx = after_passes(
        model_of("mixed_precision"), "forward", *SCHEDULE, AssignStreams(mode="side"), HandOffPrefetch()
    )
    prefetched = list(gm.graph.find_nodes(op="call_function", target=ops.PREFETCHED_ALL_GATHER))
    assert [collectives.arguments_of(node)["stream"] for node in prefetched] == ["copy_in", "copy_in"]
    run_pass(LowerStreams(), gm, ctx)
    assert list(gm.graph.find_nodes(op="call_function", target=ops.PREFETCHED_ALL_GATHER)) == prefetched


def test_declines_a_launch_whose_cast_was_rewritten() -> None:
    gm, ctx = after_passes(model_of("mixed_precision"), "forward", *SCHEDULE, AssignStreams(mode="side"))
    launch = collectives.unshard_launches(gm.graph)[0]
    (cast,) = launch.all_input_nodes
    with gm.graph.inserting_before(launch):
        scaled = gm.graph.call_function(torch.ops.aten.mul.Tensor, (cast, 1))
    scaled.meta = dict(cast.meta)
    launch.replace_input_with(cast, scaled)
    assert LowerStreams().apply(gm, ctx)
    (declined,) = ctx.declined
    assert (declined.node, declined.why) == (launch.name, "what it sends was rewritten; it stays on the main stream")


@pytest.mark.parametrize("kind", SPLIT)
def test_ranks_still_agree_on_what_is_launched(kind: GraphKind) -> None:
    earlier = (*SCHEDULE, AssignStreams(mode="side"))
    before, _ = after_passes(model_of("mixed_precision"), kind, *earlier, hardware=DEAR_COPIES)
    after, _ = lowered("mixed_precision", kind)
    agreed = [[(launch.group, launch.text) for launch in launches.sequence(gm.graph)] for gm in (before, after)]
    assert agreed[0] == agreed[1]


@pytest.mark.parametrize("unit", EVERY_UNIT)
def test_changes_no_bit(unit: Callable[..., Traced]) -> None:
    assert_same_step(step(unit(), AssignStreams(mode="side"), LowerStreams()), step(unit()), rtol=0, atol=0)


# ---- what the verifier says of a wrong one


def _another_dtype(launch: fx.Node) -> None:
    launch.update_arg(1, torch.float16)


def _another_operator(launch: fx.Node) -> None:
    launch.update_arg(2, "sum")


def _another_gradient(launch: fx.Node) -> None:
    gradients = [n for n in launch.graph.nodes if tags.meta_of(n).grads]
    launch.update_arg(0, [gradients[0]])


@pytest.mark.parametrize(
    ("edit", "kind", "invariant"),
    [
        (_another_dtype, "forward", "gathers_match_the_plan"),
        (_another_dtype, "backward", "launches_send_what_they_sent"),
        (_another_operator, "backward", "collectives_keep_their_order"),
        (_another_gradient, "backward", "launches_send_what_they_sent"),
    ],
)
def test_a_wrong_op_is_caught(edit: Callable[[fx.Node], None], kind: GraphKind, invariant: str) -> None:
    gm, ctx = after_passes(model_of("mixed_precision"), kind, *SCHEDULE, AssignStreams(mode="side"))
    target = ops.REDUCE_SCATTER_ON_STREAM if kind == "backward" else ops.ALL_GATHER_ON_STREAM

    def mistake(graph: fx.Graph) -> None:
        edit(graph.find_nodes(op="call_function", target=target)[0])

    assert broken_by(LowerStreams(), mistake, gm, ctx) == invariant
