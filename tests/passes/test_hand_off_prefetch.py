"""HandOffPrefetch: which launches reach over the ends of a graph, what is left alone, and the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from fxshard.ir import collectives, launches, ops, tags
from fxshard.passes._base import GraphKind, GraphPass, PassContext
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.hand_off_prefetch import HandOffPrefetch
from fxshard.passes.pin_order import PinOrder
from fxshard.passes.pipeline import CODEGEN_GIVEN, LAST_GIVEN
from tests.graphs import EVERY_UNIT, SPLIT, Traced, assert_changes_nothing, broken_by
from tests.schedules import DEAR_COPIES, LAYER, MODELS, SCHEDULE, after_passes, assert_schedule, model_of
from tests.steps import assert_same_step, step


def handed_off(
    model: str, kind: GraphKind, *earlier: GraphPass, options: HandOffPrefetch | None = None
) -> tuple[fx.GraphModule, PassContext]:
    passes = (*(earlier or SCHEDULE), options or HandOffPrefetch())
    return after_passes(model_of(model), kind, *passes, hardware=DEAR_COPIES)


def roles(gm: fx.GraphModule) -> list[str]:
    """What the launches of a graph are to the cache, in order; "" for those that stay as they are."""
    return [str(collectives.arguments_of(n).get("role", "")) for n in collectives.unshard_launches(gm.graph)]


@pytest.mark.parametrize("kind", SPLIT)
def test_the_first_and_the_last_launch_reach_over_the_ends(kind: GraphKind) -> None:
    gm, _ = handed_off("two_layers", kind)
    assert_schedule(gm, f"hand_off_prefetch_{kind}", whole=True)


def test_launches_between_them_stay_as_they_are() -> None:
    gm, _ = handed_off("four_layers", "forward")
    assert roles(gm) == ["first", "", "", "last"]


def test_a_launch_group_of_several_tensors_is_taken_as_one() -> None:
    gm, _ = handed_off("four_layers", "forward", CoalesceCollectives(), *SCHEDULE)
    (first, *_) = collectives.unshard_launches(gm.graph)
    given = collectives.arguments_of(first)
    assert (given["starts"], given["numels"]) == ([0, 8], [8, 2])


def test_of_several_launches_of_a_unit_the_last_one_hands_over() -> None:
    gm, _ = handed_off("four_layers", "forward", BucketCollectives(size=1e-6), *SCHEDULE)
    assert roles(gm) == ["first", "first", "", "", "", "", "", "last"]


def test_one_launch_is_first_and_last() -> None:
    assert roles(handed_off("two_layers", "backward")[0]) == ["only"]


@pytest.mark.parametrize("options", [HandOffPrefetch(hands_over=False), HandOffPrefetch(guess=False)])
def test_nothing_is_launched_for_the_next_graph_unless_wanted(options: HandOffPrefetch) -> None:
    assert roles(handed_off("four_layers", "forward", options=options)[0]) == ["first", "", "", ""]


def test_nothing_is_guessed_under_a_budget() -> None:
    passes = (*SCHEDULE, HandOffPrefetch())
    gm, _ = after_passes(model_of("four_layers"), "forward", *passes, unsharded_budget_bytes=10**6)
    assert roles(gm) == ["first", "", "", ""]
    assert not collectives.arguments_of(collectives.unshard_launches(gm.graph)[0])["guess"]


def test_declines_a_launch_of_two_units_and_says_so() -> None:
    gm, ctx = handed_off("two_layers", "forward", BucketCollectives(size=2 * LAYER), *SCHEDULE)
    assert roles(gm) == [""]
    (declined,) = ctx.declined
    assert declined.node == collectives.unshard_launches(gm.graph)[0].name
    assert declined.why == "it sends more than parts of one flat; it is launched in this graph"


@pytest.mark.parametrize("kind", SPLIT)
def test_ranks_still_agree_on_what_is_launched(kind: GraphKind) -> None:
    before, _ = after_passes(model_of("root"), kind, *SCHEDULE)
    after, _ = handed_off("root", kind)
    agreed = [[(launch.group, launch.text) for launch in launches.sequence(gm.graph)] for gm in (before, after)]
    assert agreed[0] == agreed[1]
    assert any(node.target is ops.PREFETCHED_ALL_GATHER for node in after.graph.nodes)


def test_the_next_launch_is_pinned_behind() -> None:
    """Inductor keeps the order of its own collectives alone."""
    gm, _ = handed_off("four_layers", "forward", *SCHEDULE, PinOrder())
    first, second, *_ = collectives.unshard_launches(gm.graph)
    (result,) = first.users
    assert result.name in tags.meta_of(second).after


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("model", MODELS)
def test_changes_nothing_when_run_again(model: str, kind: GraphKind) -> None:
    gm, ctx = handed_off(model, kind)
    assert_changes_nothing(HandOffPrefetch(), gm, ctx)


@pytest.mark.parametrize("unit", EVERY_UNIT)
def test_changes_no_bit(unit: Callable[..., Traced]) -> None:
    assert_same_step(step(unit(), HandOffPrefetch()), step(unit()), rtol=0, atol=0)


# ---- what the verifier says of a wrong one


def _another_part(launch: fx.Node) -> None:
    launch.update_arg(2, [2])
    launch.update_arg(3, [8])
    launch.meta["val"] = [launch.meta["val"][0][:16]]


def _as_much_of_another_part(launch: fx.Node) -> None:
    launch.update_arg(2, [1])


def _an_input_of_the_users(launch: fx.Node) -> None:
    launch.update_arg(0, next(n for n in launch.graph.nodes if tags.meta_of(n).input))


def _another_unit(launch: fx.Node) -> None:
    shards = [node for node in launch.graph.nodes if tags.meta_of(node).shard]
    launch.update_arg(0, next(shard for shard in shards if shard is not launch.args[0]))


def _other_ranks(launch: fx.Node) -> None:
    launch.update_arg(5, "another")


@pytest.mark.parametrize(
    ("edit", "before_inductor", "after_inductor"),
    [
        (_another_part, "gathers_match_the_plan", "collectives_keep_their_order"),
        (_as_much_of_another_part, "gathers_match_the_plan", "launches_send_what_they_sent"),
        (_an_input_of_the_users, "buffers_in_flight_are_waited_for", "launches_send_what_they_sent"),
        (_another_unit, "parameters_are_their_slots", "launches_send_what_they_sent"),
        (_other_ranks, "gathers_match_the_plan", "collectives_keep_their_order"),
    ],
)
@pytest.mark.parametrize("is_lowered", [False, True])
def test_a_wrong_hand_off_is_caught(
    edit: Callable[[fx.Node], None], before_inductor: str, after_inductor: str, is_lowered: bool
) -> None:
    gm, ctx = after_passes(model_of("two_layers"), "forward", *SCHEDULE)
    given = LAST_GIVEN if is_lowered else CODEGEN_GIVEN
    found = broken_by(HandOffPrefetch(), lambda graph: edit(collectives.unshard_launches(graph)[0]), gm, ctx, given)
    assert found == (after_inductor if is_lowered else before_inductor)
