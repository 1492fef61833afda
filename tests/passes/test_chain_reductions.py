"""ChainReductions: where all_reduces and copies to the host are launched, what they wait for, and the same bits."""

from __future__ import annotations

import dataclasses

import pytest
from expecttest import assert_expected_inline
from torch import fx

from fxshard.hardware import HardwareSpec
from fxshard.ir import collectives, tags
from fxshard.passes._base import GraphPass, PassContext
from fxshard.passes.chain_reductions import ChainReductions
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.sink_waits import SinkWaits
from tests.graphs import OFFLOADED, assert_changes_nothing
from tests.pairwise import pairwise
from tests.schedules import BUCKETS, DEAR_COPIES, SCHEDULE, after_passes, assert_schedule, events, model_of
from tests.steps import assert_same_step, step


def link_of(latency_in_products: float) -> HardwareSpec:
    """A link whose transfers take so many times as long as a matrix product."""
    product = 1e-3
    latency = latency_in_products * product
    return dataclasses.replace(
        DEAR_COPIES, kernel_overhead=product, link_latency=latency, link_bandwidth=1e15, host_bandwidth=1e15
    )


def chained(*before: GraphPass, latency_in_products: float = 0.5) -> tuple[fx.GraphModule, PassContext]:
    """The backward graph of four layers with replicas after the pass, and after others that ran before it."""
    model, hardware = model_of("four_layers", replicas=2), link_of(latency_in_products)
    return after_passes(model, "backward", *before, ChainReductions(), hardware=hardware)


@pytest.mark.parametrize(
    ("latency_in_products", "max_buffers", "expected"),
    [
        (0.5, 4, "mm launch3 mm mm launch2 mm mm launch1 mm mm launch0 wait3 wait2 wait1 wait0"),
        (1.5, 4, "mm mm launch3 mm mm launch2 mm mm launch1 mm launch0 wait3 wait2 wait1 wait0"),
        (1.5, 1, "mm mm launch3 mm mm launch2 mm mm launch1 mm launch0 wait3 wait2 wait1 wait0"),
        (9.0, 2, "mm mm mm mm mm launch3 mm mm launch2 launch1 launch0 wait3 wait2 wait1 wait0"),
        (9.0, 4, "mm mm mm mm mm launch3 mm mm launch2 launch1 launch0 wait3 wait2 wait1 wait0"),
    ],
)
def test_all_reduces_what_has_arrived_beside_the_compute_that_follows(
    latency_in_products: float, max_buffers: int, expected: str
) -> None:
    """What has not arrived by the costs is waited for later, but no later than the buffers allow."""
    gm, ctx = chained(SinkWaits(max_buffers=max_buffers), latency_in_products=latency_in_products)
    assert events(gm, launch="all_reduce_", wait="all_reduced_") == expected
    assert_changes_nothing(ChainReductions(), gm, ctx)


def test_launches_each_all_reduce_by_itself() -> None:
    gm, _ = chained(*BUCKETS["split"], SinkWaits())
    assert_schedule(gm, "chain_reductions_replicas", whole=True)


def test_counts_gathers_that_are_on_the_link_before_a_reduction() -> None:
    """A gather that is launched ahead of a reduction delays it: so does what follows the reduction."""
    late = chained(SinkWaits(max_buffers=4), latency_in_products=1.6)
    later = chained(SinkWaits(max_buffers=4), HoistPrefetch(depth=3), latency_in_products=1.6)
    expected = "mm mm launch3 mm mm launch2 mm mm launch1 mm launch0 wait3 wait2 wait1 wait0"
    assert events(late[0], launch="all_reduce_", wait="all_reduced_") == expected
    expected = "mm mm mm launch3 mm launch2 mm mm launch1 mm launch0 wait3 wait2 wait1 wait0"
    assert events(later[0], launch="all_reduce_", wait="all_reduced_") == expected


def test_copies_to_the_host_what_has_arrived() -> None:
    traced = model_of("four_layers", **OFFLOADED)
    passes = (SinkWaits(max_buffers=4), ChainReductions())
    gm, ctx = after_passes(traced, "backward", *passes, hardware=link_of(0.5))
    expected = "mm launch3 mm mm launch2 mm mm launch1 mm mm launch0 wait3 wait2 wait1 wait0"
    assert events(gm, launch="to_host_", wait="on_host_") == expected
    assert_changes_nothing(ChainReductions(), gm, ctx)


def test_copies_to_the_host_what_replicas_have_averaged() -> None:
    traced = model_of("four_layers", replicas=2, **OFFLOADED)
    gm, _ = after_passes(traced, "backward", SinkWaits(max_buffers=4), ChainReductions(), hardware=link_of(0.5))
    assert events(gm, launch="all_reduce_", wait="all_reduced_") == (
        "mm launch3 mm wait3 mm launch2 mm wait2 mm launch1 mm wait1 mm launch0 wait0"
    )
    assert events(gm, launch="to_host_", wait="on_host_") == (
        "mm mm launch3 mm mm launch2 mm mm launch1 mm launch0 wait3 wait2 wait1 wait0"
    )


def test_says_why() -> None:
    _, ctx = chained(SinkWaits(), latency_in_products=1.5)
    assert_expected_inline(
        "\n".join(f"{note.node}: {note.why}" for note in ctx.notes if "all_reduce" in note.node),
        """\
all_reduce_layers_3: launched where what it sends has arrived by the costs
all_reduce_layers_2: launched where what it sends has arrived by the costs
all_reduce_layers_1: launched where what it sends has arrived by the costs
all_reduce_layers_0: launched where what it sends is waited for""",
    )


@pytest.mark.parametrize("model", ["four_layers", "doubles"])
def test_changes_nothing_where_nothing_follows_a_reduction(model: str) -> None:
    assert_changes_nothing(ChainReductions(), *after_passes(model_of(model), "backward", *SCHEDULE))


def test_leaves_all_reduces_of_the_model_alone() -> None:
    gm, _ = chained(SinkWaits())
    assert all(tags.units_of(node) for node in gm.graph.nodes if node.target in collectives.ALL_REDUCES)


@pairwise(model=["two_layers", "doubles", "called_twice", "two_dtypes"], before=BUCKETS, offloaded=[False, True])
def test_changes_no_bit_of_what_replicas_get(model: str, before: str, offloaded: bool) -> None:
    traced = model_of(model, replicas=2, **(OFFLOADED if offloaded else {}))
    passes = (*BUCKETS[before], *SCHEDULE, ChainReductions())
    assert_same_step(
        step(traced, *passes, hardware=DEAR_COPIES),
        step(traced, *BUCKETS[before], hardware=DEAR_COPIES),
        rtol=0,
        atol=0,
    )
