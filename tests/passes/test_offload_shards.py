"""OffloadShards: what is gathered is a copy on the device, what is given out one on the host, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from fxshard.ir import collectives, ops
from fxshard.passes._base import GraphKind, GraphPass
from fxshard.passes.assign_streams import AssignStreams
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.chain_reductions import ChainReductions
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.hand_off_prefetch import HandOffPrefetch
from fxshard.passes.hoist_copies import HoistCopies
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.lower_streams import LowerStreams
from fxshard.passes.offload_shards import OffloadShards
from fxshard.passes.sink_waits import SinkWaits
from tests import graphs
from tests.graphs import EVERY_UNIT, OFFLOADED, SPLIT, Traced, assert_changes_nothing, assert_golden, run_pass, text
from tests.pairwise import each_once
from tests.steps import assert_same_step, step

REWRITES: dict[str, tuple[GraphPass, ...]] = {
    "merged": (BucketCollectives(size=1.0),),
    "split": (BucketCollectives(size=6e-5),),
    "coalesced": (CoalesceCollectives(),),
    "scheduled": (SinkWaits(), HoistPrefetch(depth=1), HoistCopies(), ChainReductions()),
    "merged and scheduled": (BucketCollectives(size=1.0), CoalesceCollectives(), HoistPrefetch(depth=2), HoistCopies()),
    "nothing overlaps": (SinkWaits(), HoistPrefetch(depth=1), HoistCopies(), AssignStreams(mode="off")),
    "aside": (SinkWaits(), HoistPrefetch(depth=1), HoistCopies(), AssignStreams(mode="side"), LowerStreams()),
    "handed off": (HandOffPrefetch(), LowerStreams()),
}


@pytest.mark.parametrize("kind", SPLIT)
def test_copies_shards_to_the_device_and_gradients_to_the_host(kind: GraphKind) -> None:
    gm, ctx = graphs.offloaded().at(kind, after=DedupUnshard)
    assert run_pass(OffloadShards(), gm, ctx)
    assert_golden(text(gm), f"offload_shards_{kind}")


@pytest.mark.parametrize("kind", SPLIT)
def test_collectives_are_of_what_is_on_the_device(kind: GraphKind) -> None:
    gm, _ = graphs.offloaded().at(kind, after=InsertCollectives)
    assert_golden(text(gm), f"offload_shards_inserted_{kind}")


def test_copies_a_shard_once_for_each_call_of_its_unit() -> None:
    gm, _ = graphs.called_twice(**OFFLOADED).at("forward", after=InsertCollectives)
    copies = gm.graph.find_nodes(op="call_function", target=ops.COPY_TO_DEVICE)
    assert [node.name for node in copies] == ["to_device_layers_0", "to_device_layers_0_call1"]


@pytest.mark.parametrize("kind", SPLIT)
def test_changes_nothing_where_no_unit_is_offloaded(kind: GraphKind) -> None:
    assert_changes_nothing(OffloadShards(), *graphs.two_layers().at(kind, after=DedupUnshard))


@pytest.mark.parametrize("kind", SPLIT)
def test_changes_nothing_when_run_again(kind: GraphKind) -> None:
    gm, ctx = graphs.offloaded().at(kind, after=DedupUnshard)
    run_pass(OffloadShards(), gm, ctx)
    assert_changes_nothing(OffloadShards(), gm, ctx)


@each_once(unit=EVERY_UNIT, world_size=[2, 1])
def test_changes_no_bit(unit: Callable[..., Traced], world_size: int) -> None:
    offloaded = step(unit(world_size=world_size, **OFFLOADED))
    assert_same_step(offloaded, step(unit(world_size=world_size)), rtol=0, atol=0)


@each_once(unit=[graphs.two_layers, graphs.two_dtypes, graphs.mixed_precision], rewritten=REWRITES)
def test_changes_no_bit_whatever_becomes_of_the_launches(unit: Callable[..., Traced], rewritten: str) -> None:
    assert_same_step(step(unit(**OFFLOADED), *REWRITES[rewritten]), step(unit()), rtol=0, atol=0)


def test_changes_no_bit_of_replicas_and_subgroups() -> None:
    by_two = {"world_size": 4, "reshard_after_forward": 2}
    for kwargs in ({"replicas": 2}, by_two):
        assert_same_step(step(graphs.offloaded(**kwargs)), step(graphs.two_layers(**kwargs)), rtol=0, atol=0)


def test_only_a_device_with_memory_of_its_own_has_pinned_copies() -> None:
    gm, _ = graphs.offloaded().at("backward", after=InsertCollectives)
    copies = gm.graph.find_nodes(op="call_function", target=ops.COPY_TO_HOST)
    assert [node.args[1] for node in copies] == [False, False]


@pytest.mark.parametrize("kind", SPLIT)
def test_hands_over_no_gather_of_what_is_copied_from_the_host(kind: GraphKind) -> None:
    gm, ctx = graphs.offloaded().at(kind, after=InsertCollectives)
    HandOffPrefetch().apply(gm, ctx)
    assert not gm.graph.find_nodes(op="call_function", target=ops.PREFETCHED_ALL_GATHER)
    expected = {"its shard is copied from the host; it is launched in this graph"} if _gathers(gm) else set()
    assert {remark.why for remark in ctx.declined} == expected


def _gathers(gm: fx.GraphModule) -> list[fx.Node]:
    return collectives.unshard_launches(gm.graph)
