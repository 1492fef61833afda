"""What runs beside what, read from a trace of torch's profiler."""

from __future__ import annotations

import pytest

from tests.gpu.checks import on_link
from tests.gpu.streams import (
    OwnStream,
    Shape,
    check_order,
    overlap_problems,
    profiled_step,
    train_with_own_stream,
)

pytestmark = pytest.mark.gpu

SHAPE = Shape.of("cuda")


@pytest.mark.parametrize("streams", ["auto", "nccl", "side"])
def test_all_gathers_and_reductions_run_beside_the_products_of_their_neighbours(streams: str) -> None:
    with on_link("cuda", gigabytes_per_s=SHAPE.gigabytes_per_s, latency_us=SHAPE.latency_us):
        events = profiled_step("cuda", SHAPE, streams=streams)
    check_order(events, SHAPE)
    assert overlap_problems(events, SHAPE) == []


def test_without_streams_or_prefetch_most_transfers_are_exposed() -> None:
    with on_link("cuda", gigabytes_per_s=SHAPE.gigabytes_per_s, latency_us=SHAPE.latency_us):
        events = profiled_step("cuda", SHAPE, streams="off", prefetch="off")
    assert len(overlap_problems(events, SHAPE)) > SHAPE.num_blocks


@pytest.mark.parametrize("schedule", ["auto", "fsdp2"])
def test_an_optimizer_on_a_stream_of_its_own_changes_nothing(schedule: str) -> None:
    with on_link("cuda"):
        train_with_own_stream("cuda", OwnStream("cuda"), schedule=schedule)
