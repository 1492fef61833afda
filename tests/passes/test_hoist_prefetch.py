"""HoistPrefetch: where each gather goes by depth and by lists, what memory allows, and the same bits for all ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fxshard.cost.bucket_sizes import MIB
from fxshard.errors import ConfigError
from fxshard.hardware import BUILTIN
from fxshard.ir import collectives, liveness
from fxshard.passes._base import GraphKind, GraphPass, PassContext
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.sink_waits import SinkWaits
from tests import graphs
from tests.graphs import SPLIT, Layers, Traced, assert_changes_nothing, layers_of, run_pass, trace
from tests.models import Doing, matrix
from tests.pairwise import each_once, pairwise, slow
from tests.schedules import (
    DEAR_COPIES,
    LAYER,
    MODELS,
    Lists,
    after_passes,
    assert_schedule,
    events,
    kept,
    model_of,
    with_lists,
)
from tests.steps import assert_same_step, step

BYTES = int(LAYER * MIB)
"""Of a gathered layer."""


def hoisted(
    traced: Traced, kind: GraphKind, depth: int = 1, *before: GraphPass, **context: Any
) -> tuple[fx.GraphModule, PassContext]:
    return after_passes(traced, kind, *before, HoistPrefetch(depth=depth), **context)


gathers = functools.partial(events, launch="unshard_", wait="wait_")


def reasons(ctx: PassContext) -> str:
    return "\n".join(f"{note.node}: {note.why}" for note in ctx.notes)


def peak(gm: fx.GraphModule) -> int:
    return max(nbytes for _, nbytes in liveness.unsharded_bytes(gm.graph))


# ---- goldens


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("model", [model for model in MODELS if model not in ("kept", "doubles", "tied_head")])
def test_launches_one_ahead(model: str, kind: GraphKind) -> None:
    gm, _ = hoisted(model_of(model), kind, verify="debug")
    casts = model == "mixed_precision"  # which move along
    assert_schedule(gm, f"hoist_prefetch_{model}_{kind}", whole=casts)


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("coalesced", CoalesceCollectives()),
        ("merged", BucketCollectives(size=2 * LAYER)),
        ("split", BucketCollectives(size=0.9 * LAYER)),
    ],
)
def test_launches_what_other_passes_made_one_ahead(name: str, before: GraphPass, kind: GraphKind) -> None:
    gm, _ = hoisted(model_of("four_layers"), kind, 1, before, hardware=DEAR_COPIES, verify="debug")
    assert_schedule(gm, f"hoist_prefetch_{name}_{kind}", whole=name != "merged")


def test_launches_ahead_what_stays_gathered() -> None:
    gm, _ = hoisted(model_of("kept"), "forward", verify="debug")
    assert_schedule(gm, "hoist_prefetch_kept_forward")


# ---- depth

FORWARD = {
    0: "launch0 wait0 mm launch1 wait1 mm launch2 wait2 mm launch3 wait3 mm",
    1: "launch0 launch1 wait0 mm launch2 wait1 mm launch3 wait2 mm wait3 mm",
    2: "launch0 launch1 launch2 wait0 mm launch3 wait1 mm wait2 mm wait3 mm",
    4: "launch0 launch1 launch2 launch3 wait0 mm wait1 mm wait2 mm wait3 mm",
}
BACKWARD = {
    0: "mm launch3 wait3 mm mm launch2 wait2 mm mm launch1 wait1 mm mm",
    1: "launch3 launch2 mm wait3 mm launch1 mm wait2 mm mm wait1 mm mm",
    2: "launch3 launch2 launch1 mm wait3 mm mm wait2 mm mm wait1 mm mm",
    4: "launch3 launch2 launch1 mm wait3 mm mm wait2 mm mm wait1 mm mm",
}


@pytest.mark.parametrize("depth", FORWARD)
def test_launches_where_the_unit_before_has_been_read(depth: int) -> None:
    traced = model_of("four_layers")
    assert gathers(hoisted(traced, "forward", depth)[0]) == FORWARD[depth]
    assert gathers(hoisted(traced, "backward", depth)[0]) == BACKWARD[depth]


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_gathers_no_more_units_than_the_depth_and_one(depth: int, kind: GraphKind) -> None:
    gm, _ = hoisted(model_of("four_layers"), kind, depth, CoalesceCollectives(), hardware=DEAR_COPIES)  # no copies out
    num_units, nbytes = (4, BYTES) if kind == "forward" else (3, 64)  # backward reads matrices, of all layers but one
    assert peak(gm) == nbytes * min(depth + 1, num_units)


@pairwise(model=MODELS, depth=[1, 2], kind=SPLIT)
def test_takes_no_more_than_the_depth_in_units_more(model: str, depth: int, kind: GraphKind) -> None:
    traced = model_of(model)
    before, _ = traced.at(kind, after=InsertCollectives)
    if not collectives.unshard_launches(before.graph):
        assert (model, kind) == ("kept", "backward")
        return
    layer = max(plan.unsharded_bytes for unit, plan in traced.plan.units.items() if unit)
    assert peak(hoisted(traced, kind, depth)[0]) <= peak(before) + depth * layer


def test_keeps_the_root_apart_from_what_the_depth_counts() -> None:
    gm, _ = hoisted(model_of("root"), "forward", 1, CoalesceCollectives(), hardware=DEAR_COPIES)
    assert peak(gm) == 64 + 2 * BYTES  # of the root's two matrices the first has been read
    assert gathers(gm).split()[:3] == ["unshard_root", "launch0", "wait_root"]


@pytest.mark.parametrize("kind", SPLIT)
def test_has_the_first_gather_run_from_the_start(kind: GraphKind) -> None:
    gm, _ = hoisted(model_of("four_layers"), kind)
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    assert collectives.is_launch(first)


@pairwise(model=["four_layers", "root", "tied_head"], size=[0.5, 0.9, 2], depth=[1, 2, "auto"], kind=SPLIT)
def test_keeps_the_order_in_which_gathers_are_needed(model: str, size: float, depth: Any, kind: GraphKind) -> None:
    before, _ = after_passes(model_of(model), kind, BucketCollectives(size=size * LAYER))
    gm, _ = hoisted(model_of(model), kind, depth, BucketCollectives(size=size * LAYER))
    needed, launched = (map(str, collectives.unshard_launches(each.graph)) for each in (before, gm))
    assert list(launched) == list(needed)


def shifted() -> nn.Module:
    """A layer with a vector before its matrix, and one behind it: neighbours share a launch for these two."""
    return Doing(lambda m, x: (x + m.shift) @ m.weight + m.bias, shift=matrix(4), weight=matrix(4, 4), bias=matrix(4))


@pytest.mark.parametrize("depth", [1, "auto"])
def test_gathers_no_row_of_units_at_once_because_neighbours_share_launches(depth: Any) -> None:
    traced = trace(Layers(6, shifted), units=layers_of, reshard_after_forward=True)
    small = dataclasses.replace(BUILTIN["cpu"], link_latency=1e-6, link_bandwidth=0.897e6)  # 16 bytes are too little
    buckets = BucketCollectives(size="auto")
    before, _ = after_passes(traced, "forward", buckets, hardware=small)
    gm, _ = hoisted(traced, "forward", depth, buckets, hardware=small)
    assert "launch0_to_layers_1" in gathers(gm)
    assert peak(gm) <= peak(before) + 2 * 96 < 6 * 96


# ---- lists


@pytest.mark.parametrize("depth", [0, 1])
def test_launches_what_is_listed_in_this_order_right_after_the_wait(depth: int) -> None:
    listed = {"layers.0": ("layers.2", "layers.1"), "layers.1": None, "layers.2": ("layers.3",), "layers.3": None}
    gm, _ = hoisted(with_lists(model_of("four_layers"), forward=listed), "forward", depth)
    assert gathers(gm) == "launch0 wait0 launch2 launch1 mm wait1 mm wait2 launch3 mm wait3 mm"


def test_launches_in_backward_what_is_listed_for_backward() -> None:
    listed = {"layers.3": ("layers.1", "layers.2"), "layers.2": None}
    traced = with_lists(model_of("four_layers"), backward=listed)
    assert gathers(hoisted(traced, "forward")[0]) == FORWARD[1]
    assert (
        gathers(hoisted(traced, "backward", 0)[0]) == "mm launch3 wait3 launch1 launch2 mm mm wait2 mm mm wait1 mm mm"
    )


def test_prefers_a_list_to_the_depth_for_that_unit_alone() -> None:
    gm, _ = hoisted(with_lists(model_of("four_layers"), forward={"layers.1": ("layers.3",)}), "forward", 1)
    assert gathers(gm) == "launch0 launch1 wait0 mm wait1 launch3 mm launch2 wait2 mm wait3 mm"


def test_launches_nothing_ahead_for_a_unit_without_a_list() -> None:
    gm, _ = hoisted(with_lists(model_of("four_layers"), forward={"layers.0": None, "layers.1": None}), "forward", 1)
    assert gathers(gm) == "launch0 wait0 mm launch1 wait1 mm launch2 launch3 wait2 mm wait3 mm"


def test_launches_once_what_two_units_list() -> None:
    listed = {"layers.0": ("layers.1", "layers.2"), "layers.1": ("layers.2", "layers.3"), "layers.2": None}
    gm, _ = hoisted(with_lists(model_of("four_layers"), forward=listed), "forward", 1)
    assert gathers(gm) == "launch0 wait0 launch1 launch2 mm wait1 launch3 mm wait2 mm wait3 mm"


@pytest.mark.parametrize("listed", [("layers.0",), ("layers.1",), ("nowhere",)])
def test_launches_nothing_for_what_is_gathered_already_or_not_at_all(listed: tuple[str, ...]) -> None:
    everywhere = {f"layers.{i}": None for i in range(4)} | {"layers.1": listed}
    gm, ctx = hoisted(with_lists(model_of("four_layers"), forward=everywhere), "forward", 1)
    assert gathers(gm) == FORWARD[0]
    assert not ctx.history.last("forward").changed


def test_launches_the_next_call_of_a_unit_that_is_called_twice() -> None:
    listed = {"layers.0": ("layers.1",), "layers.1": ("layers.0",)}
    gm, _ = hoisted(with_lists(model_of("called_twice"), forward=listed), "forward", 0)
    assert gathers(gm) == "launch0 wait0 launch1 mm wait1 launch0_call1 mm wait0_call1 launch1_call1 mm wait1_call1 mm"


def test_launches_for_a_bucket_what_any_of_its_units_lists() -> None:
    listed = {"layers.0": None, "layers.1": ("layers.3",)}
    traced = with_lists(model_of("four_layers"), forward=listed)
    gm, _ = hoisted(traced, "forward", 0, BucketCollectives(size=2 * LAYER))
    assert gathers(gm) == "launch0_to_layers_1 wait0 mm wait1 launch2_to_layers_3 mm wait2 mm wait3 mm"


# ---- limits, reasons, refusals


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("units", [0, 1, 2])
def test_stays_within_the_budget(units: int, depth: int) -> None:
    before, _ = model_of("four_layers").at("forward", after=InsertCollectives)
    budget = peak(before) + units * BYTES
    gm, _ = hoisted(model_of("four_layers"), "forward", depth, unsharded_budget_bytes=budget)
    assert peak(gm) == peak(before) + min(units, depth, 3) * BYTES
    if units >= depth:
        assert gathers(gm) == FORWARD[depth]


def test_launches_as_early_as_the_budget_allows_and_says_so() -> None:
    budget = 200  # a layer, its parameters while they are copied out, and half of a layer
    gm, ctx = hoisted(model_of("four_layers"), "forward", 1, unsharded_budget_bytes=budget)
    assert peak(gm) <= budget
    assert gathers(gm) == "launch0 wait0 launch1 mm wait1 launch2 mm wait2 launch3 mm wait3 mm"
    assert "unshard_layers_1: 1 ahead, before layers.0 is needed; no earlier: memory budget: " in reasons(ctx)


def test_says_why() -> None:
    _, ctx = hoisted(with_lists(model_of("four_layers"), forward={"layers.2": ("layers.3",)}), "forward", 1)
    assert_expected_inline(
        reasons(ctx),
        """\
unshard_layers_0: first of the graph
unshard_layers_1: 1 ahead, before layers.0 is needed
unshard_layers_2: 1 ahead, before layers.1 is needed
unshard_layers_3: in the list of layers.2""",
    )


def test_launches_nothing_before_what_it_sends() -> None:
    gm, ctx = graphs.two_layers().at("forward", after=InsertCollectives)
    _, second = collectives.unshard_launches(gm.graph)
    (shard,) = second.all_input_nodes
    with gm.graph.inserting_before(second):  # read by another node as well, so that it stays where it is
        copied = gm.graph.call_function(torch.ops.aten.clone.default, (shard,))
        copied.meta["val"] = shard.meta["val"].clone()
        other = gm.graph.call_function(torch.ops.aten.neg.default, (copied,))
        other.meta["val"] = shard.meta["val"].clone()
    second.replace_input_with(shard, copied)
    ctx = dataclasses.replace(ctx, verify=False)
    run_pass(HoistPrefetch(depth=1), gm, ctx)
    assert list(gm.graph.nodes).index(second) > list(gm.graph.nodes).index(copied)
    assert reasons(ctx).endswith(f"1 ahead, before layers.0 is needed; no earlier: it reads %{copied.name}")


@pytest.mark.parametrize("depth", [-1, 1.0, "automatic", "off", True, None])
def test_refuses_what_is_no_depth(depth: object) -> None:
    with pytest.raises(ConfigError, match=r"prefetch must be a number of units"):
        HoistPrefetch(depth=depth)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "kind", "depth"),
    [
        (graphs.two_layers, "forward", 0),
        (graphs.two_layers, "backward", 0),
        (graphs.uneven, "forward", 1),  # one gather, at the start
        (kept, "backward", 1),  # none
        (functools.partial(graphs.two_layers, world_size=1), "forward", 1),
    ],
)
def test_changes_nothing_where_nothing_can_go_ahead(build: Callable[..., Traced], kind: GraphKind, depth: int) -> None:
    gm, ctx = build().at(kind, after=InsertCollectives)
    assert_changes_nothing(HoistPrefetch(depth=depth), gm, ctx)


# ---- any schedule

SIZES = {"unit": None, "merged": BucketCollectives(size=2 * LAYER), "split": BucketCollectives(size=0.9 * LAYER)}


@functools.cache
def traced_layers(count: int) -> Traced:
    return trace(Layers(count), units=layers_of)


@functools.cache
def step_before(count: int) -> Any:
    return step(traced_layers(count))


@st.composite
def lists(draw: st.DrawFn, count: int) -> Lists:
    keys = [f"layers.{i}" for i in range(count)]
    some = st.lists(st.sampled_from(keys), max_size=count, unique=True).map(tuple)
    return draw(st.dictionaries(st.sampled_from(keys), st.none() | some))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data(), count=st.integers(1, 4), depth=st.integers(0, 4), buffers=st.integers(1, 4))
def test_any_schedule_has_the_same_nodes_and_computes_the_same_bits(
    data: st.DataObject, count: int, depth: int, buffers: int
) -> None:
    bucket = SIZES[data.draw(st.sampled_from(sorted(SIZES)))]
    cut = [CoalesceCollectives(same_sums=True)] if data.draw(st.booleans()) else []
    before: list[GraphPass] = [*([bucket] if bucket else []), *cut]
    traced = with_lists(traced_layers(count), forward=data.draw(lists(count)), backward=data.draw(lists(count)))
    both: list[GraphPass] = [SinkWaits(max_buffers=buffers), HoistPrefetch(depth=depth)]
    schedule = data.draw(st.permutations(both))
    for kind in SPLIT:
        gm, ctx = traced.at(kind, after=InsertCollectives)
        ctx = dataclasses.replace(ctx, hardware=DEAR_COPIES)
        for step_ in before:
            run_pass(step_, gm, ctx)
        nodes = {node.name: node.format_node() for node in gm.graph.nodes}
        for step_ in schedule:
            run_pass(step_, gm, ctx)
        assert {node.name: node.format_node() for node in gm.graph.nodes} == nodes
    assert_same_step(step(traced, *before, *schedule, hardware=DEAR_COPIES), step_before(count), rtol=0, atol=0)


@each_once(build=graphs.EVERY_UNIT, world_size=[4, 1])
def test_computes_the_same_bits(build: Callable[..., Traced], world_size: int) -> None:
    assert_same_bits(build(world_size=world_size))


@pytest.mark.parametrize("world_size", [slow(1), 4])
@pytest.mark.parametrize("model", MODELS)
def test_computes_the_same_bits_with_several_units(model: str, world_size: int) -> None:
    assert_same_bits(model_of(model, world_size=world_size))


def assert_same_bits(traced: Traced) -> None:
    schedule = (SinkWaits(max_buffers=1), HoistPrefetch(depth=2))
    assert_same_step(step(traced, *schedule), step(traced), rtol=0, atol=0)
