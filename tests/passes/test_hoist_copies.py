"""HoistCopies: copies of shards begin ahead of their gathers, within the budget, and no bit changes."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from fxshard.hardware import BUILTIN
from fxshard.ir import ops
from fxshard.ir.liveness import unsharded_bytes
from fxshard.passes._base import GraphKind, GraphPass
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.hoist_copies import HoistCopies
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.sink_waits import SinkWaits
from tests.graphs import OFFLOADED, SPLIT, Traced, assert_changes_nothing, run_pass
from tests.schedules import after_passes, assert_schedule, model_of
from tests.steps import assert_same_step, step

PLACED: tuple[GraphPass, ...] = (SinkWaits(), HoistPrefetch(depth=1))
SLOW_HOST = dataclasses.replace(BUILTIN["h100"], host_bandwidth=1e3)


def model() -> Traced:
    return model_of("four_layers", **OFFLOADED)


@pytest.mark.parametrize("kind", SPLIT)
def test_begins_each_copy_one_gather_ahead(kind: GraphKind) -> None:
    gm, _ = after_passes(model(), kind, *PLACED, HoistCopies())
    assert_schedule(gm, f"hoist_copies_{kind}")


def test_begins_them_as_early_as_the_link_to_the_host_needs() -> None:
    gm, ctx = after_passes(model(), "forward", *PLACED, HoistCopies(), hardware=SLOW_HOST)
    (first,) = {node.prev.op for node in gm.graph.find_nodes(op="call_function", target=ops.COPY_TO_DEVICE)[:1]}
    assert first == "placeholder"
    names = [node.name for node in gm.graph.nodes if node.op == "call_function"][:4]
    assert names == [f"to_device_layers_{i}" for i in range(4)]
    assert {note.why for note in ctx.notes if note.node == "to_device_layers_3"} == {"to have arrived by the costs"}


def test_copies_what_the_budget_has_room_for() -> None:
    gm, ctx = after_passes(model(), "forward", *PLACED)
    budget = max(used for _, used in unsharded_bytes(gm.graph))
    run_pass(HoistCopies(), gm, dataclasses.replace(ctx, hardware=SLOW_HOST, unsharded_budget_bytes=budget))
    assert max(used for _, used in unsharded_bytes(gm.graph)) <= budget
    assert any("memory budget" in note.why for note in ctx.notes)


@pytest.mark.parametrize("depth", [1, "auto"])
@pytest.mark.parametrize("size", ["unit", 100.0])
def test_shards_on_the_device_count_wherever_gathers_are_moved(size: str | float, depth: int | Literal["auto"]) -> None:
    gm, _ = model().at("forward", after=InsertCollectives)
    alone = max(used for _, used in unsharded_bytes(gm.graph))
    for budget in range(alone, 2 * alone, alone // 5):
        passes = (BucketCollectives(size=size), HoistPrefetch(depth=depth), HoistCopies())
        gm, _ = after_passes(model(), "forward", *passes, unsharded_budget_bytes=budget)
        assert max(used for _, used in unsharded_bytes(gm.graph)) <= budget


@pytest.mark.parametrize("kind", SPLIT)
def test_changes_nothing_without_copies_to_the_device(kind: GraphKind) -> None:
    assert_changes_nothing(HoistCopies(), *after_passes(model_of("four_layers"), kind, *PLACED))


@pytest.mark.parametrize("kind", SPLIT)
def test_changes_nothing_when_run_again(kind: GraphKind) -> None:
    assert_changes_nothing(HoistCopies(), *after_passes(model(), kind, *PLACED, HoistCopies()))


def test_changes_no_bit() -> None:
    passes = (*PLACED, HoistCopies())
    assert_same_step(step(model(), *passes), step(model()), rtol=0, atol=0)
