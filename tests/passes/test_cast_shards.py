"""CastShards: one cast for all tensors of a gather, the same bits, and which casts stay."""

from __future__ import annotations

import pytest
from torch import fx

from fxshard.ir import ops
from fxshard.passes._base import GraphKind, PassContext, Property
from fxshard.passes.assign_streams import AssignStreams
from fxshard.passes.cast_shards import CastShards
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.hand_off_prefetch import HandOffPrefetch
from tests.graphs import SPLIT, assert_golden, run_pass, text
from tests.schedules import DEAR_COPIES, DEAR_TENSORS, after_passes, model_of
from tests.steps import assert_same_step, step

GIVEN = (Property.COLLECTIVES, Property.SCHEDULED, Property.LOWERED)
ON_CPU = CastShards(devices=("cpu",))


def coalesced(kind: GraphKind, mode: str = "nccl") -> tuple[fx.GraphModule, PassContext]:
    """A graph whose launches send several tensors."""
    passes = CoalesceCollectives(), AssignStreams(mode=mode)
    return after_passes(model_of("mixed_precision"), kind, *passes, hardware=DEAR_COPIES)


def copies_in(gm: fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=ops.COPY))


def test_one_op_casts_all_that_a_launch_sends_of_a_shard() -> None:
    gm, ctx = coalesced("forward")
    run_pass(ON_CPU, gm, ctx, given=GIVEN)
    assert_golden(text(gm), "cast_shards_forward")


@pytest.mark.parametrize("world_size", [2, 3])
def test_computes_the_same_bits(world_size: int) -> None:
    traced = model_of("mixed_precision", world_size=world_size)
    actual = step(traced, CoalesceCollectives(), ON_CPU, hardware=DEAR_COPIES)
    assert_same_step(actual, step(traced, CoalesceCollectives(), hardware=DEAR_COPIES), rtol=0, atol=0)


@pytest.mark.parametrize("kind", SPLIT)
def test_changes_nothing_when_run_again(kind: GraphKind) -> None:
    gm, ctx = coalesced(kind)
    run_pass(ON_CPU, gm, ctx, given=GIVEN)
    assert not run_pass(ON_CPU, gm, ctx, given=GIVEN)


def test_leaves_other_devices_alone() -> None:
    gm, ctx = coalesced("forward")
    assert not run_pass(CastShards(), gm, ctx, given=GIVEN)


def test_leaves_a_shard_that_is_sent_whole_to_inductor() -> None:
    gm, ctx = after_passes(model_of("mixed_precision"), "forward", CoalesceCollectives(), hardware=DEAR_TENSORS)
    assert not run_pass(ON_CPU, gm, ctx, given=GIVEN)


def test_leaves_casts_on_a_side_stream() -> None:
    gm, ctx = coalesced("forward", "side")
    assert not run_pass(ON_CPU, gm, ctx, given=GIVEN)


def test_the_cache_launches_what_was_cast_once_and_casts_it_itself() -> None:
    gm, ctx = coalesced("forward")
    run_pass(ON_CPU, gm, ctx, given=GIVEN)
    assert copies_in(gm) > 0
    run_pass(HandOffPrefetch(), gm, ctx, given=GIVEN)
    prefetched = len(gm.graph.find_nodes(op="call_function", target=ops.PREFETCHED_ALL_GATHER))
    assert prefetched > 0
    assert copies_in(gm) == 3 - prefetched
