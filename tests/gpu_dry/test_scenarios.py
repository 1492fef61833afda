"""The scenarios of the GPU lane on the CPU: all of them but CUDA itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.gpu.checkpoint import CHECKPOINTS, check_checkpoint
from tests.gpu.checks import (
    GROUPS,
    accumulating_graph,
    check_against_fsdp2,
    check_collectives,
    check_in_float64,
    on_link,
    one_rank,
)
from tests.gpu.cudagraphs import assert_same, train_and_count
from tests.gpu.memory import graph_peaks
from tests.gpu.ops import DTYPES, check_addmm_acc
from tests.gpu.poison import Poison, check_poison
from tests.gpu.steady import STREAMS, Sample, samples_of_steps, steps_without_synchronising, unsteady
from tests.gpu.streams import OwnStream, Shape, check_order, profiled_step, train_with_own_stream
from tests.numerics.scenarios import NOT_IN_FSDP2, OWN_PRECISION, Lane, names

QUICK = ("autocast", "GradScaler", "one line")
"""Scenarios that do something of their own with the device."""


def sometimes(lane: Lane, quick: tuple[str, ...], *, but: tuple[str, ...] = ()) -> list[ParameterSet]:
    """The scenarios of a lane, but some; those that are not quick are slow."""
    marks = {name: () if name in quick else pytest.mark.slow for name in names(lane, but=but)}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", sometimes(Lane.ONE_RANK, QUICK, but=NOT_IN_FSDP2))
def test_one_rank_trains_as_fsdp2(name: str) -> None:
    with one_rank("cpu"):
        check_against_fsdp2(name, "cpu", "fp32")


@pytest.mark.parametrize("name", sometimes(Lane.ONE_RANK, QUICK, but=NOT_IN_FSDP2 + OWN_PRECISION))
def test_one_rank_trains_in_bf16_as_fsdp2(name: str) -> None:
    with one_rank("cpu"):
        check_against_fsdp2(name, "cpu", "bf16")


@pytest.mark.parametrize("name", sometimes(Lane.ONE_RANK, QUICK, but=OWN_PRECISION))
def test_one_rank_trains_as_unsharded(name: str) -> None:
    with one_rank("cpu"):
        check_in_float64(name, "cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", sometimes(Lane.LINK, ("clipped gradients", "offloaded", "replicas")))
def test_emulated_ranks_train_as_fsdp2(name: str, precision: str) -> None:
    with on_link("cpu"):
        check_against_fsdp2(name, "cpu", precision)


@pytest.mark.slow
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("name", ["accumulation", "offloaded accumulation"])
def test_emulated_ranks_train_as_fsdp2_whatever_the_streams(name: str, streams: str) -> None:
    with on_link("cpu"):
        check_against_fsdp2(name, "cpu", "bf16", streams=streams)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("group", GROUPS)
def test_compiled_code_trains_as_fsdp2(group: str, precision: str) -> None:
    with GROUPS[group]("cpu"):
        check_against_fsdp2("accumulation", "cpu", precision, lower="inductor")


def test_the_backend_takes_what_graphs_launch() -> None:
    with one_rank("cpu"):
        check_collectives("cpu")


@pytest.mark.slow
def test_accumulates_inside_the_matrix_product() -> None:
    with one_rank("cpu"):
        assert "addmm_acc" in accumulating_graph("cpu", "fp32")
        assert "addmm_acc" not in accumulating_graph("cpu", "bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "through", [pytest.param(each, marks=() if each == "a folder" else pytest.mark.slow) for each in CHECKPOINTS]
)
def test_goes_on_from_a_checkpoint(through: str, tmp_path: Path) -> None:
    with one_rank("cpu"):
        check_checkpoint(through, "cpu", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ({"prefetch": "off"}, {"prefetch": 2}, {"bucket": "auto"})
        ),
    ],
    ids=str,
)
def test_graphs_take_what_their_explanation_says(options: dict[str, Any]) -> None:
    with on_link("cpu", latency_us=1.0):  # an instant link holds no inputs until they have been waited for
        peaks = graph_peaks("cpu", width=64, rows=32, lower="eager", **options)
    for stage, peak in peaks.items():
        assert peak.measured == pytest.approx(peak.expected, rel=0.05), (stage, peak)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_steady_steps_run(group: str) -> None:
    with GROUPS[group]("cpu"):
        losses = steps_without_synchronising("cpu", lower="eager")
        samples = samples_of_steps("cpu", num_steps=3, warmup=1, lower="eager")
    assert all(loss.isfinite() for loss in losses)
    assert unsteady(samples) == []


def test_tells_steps_that_do_not_allocate_alike() -> None:
    steady = [Sample(allocations=10 * i, active_bytes=512, reserved_bytes=1024) for i in range(5)]
    assert unsteady(steady) == []
    steady[3] = dataclasses.replace(steady[3], active_bytes=1024)
    assert unsteady(steady) == ["active bytes: 512 at first, 1,024 at 3, 512 at last"]
    steady[3] = Sample(allocations=31, active_bytes=512, reserved_bytes=1024)
    assert unsteady(steady) == ["allocations per step: 10 at first, 11 at 2, 9 at last"]
    retried = [Sample(retries=i) for i in range(3)]
    assert unsteady(retried) == ["2 allocations were tried again"]


def test_poison_fills_what_was_freed_with_numbers_that_are_none() -> None:
    with Poison("cpu") as poison:
        source = torch.ones(1000)
        other = source + 1
        del source
        other.neg_()
    assert [block.nbytes for block in poison._kept] == [4000, 4000]
    for dtype in DTYPES:
        assert all(block.view(dtype).isnan().all() for block in poison._kept)


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "streams", ["auto", *(pytest.param(s, marks=() if s == "side" else pytest.mark.slow) for s in STREAMS)]
)
def test_no_memory_is_freed_while_it_is_read(streams: str, lower: str) -> None:
    with on_link("cpu", gigabytes_per_s=0.1, latency_us=100.0):
        check_poison("cpu", streams=streams, lower=lower)


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("streams", ["auto", "nccl", "side"])
def test_launches_ahead_of_the_compute_before(streams: str, lower: str) -> None:
    shape = Shape.of("cpu")
    with on_link("cpu", gigabytes_per_s=shape.gigabytes_per_s):
        check_order(profiled_step("cpu", shape, streams=streams, lower=lower), shape)


def test_without_prefetch_the_order_is_another() -> None:
    shape = Shape.of("cpu")
    with on_link("cpu"), pytest.raises(AssertionError):
        check_order(profiled_step("cpu", shape, lower="eager", prefetch="off"), shape)


@pytest.mark.slow
def test_an_optimizer_with_an_event_changes_nothing() -> None:
    with on_link("cpu"):
        train_with_own_stream("cpu", OwnStream("cpu"))


@pytest.mark.slow
def test_steps_are_counted_without_graphs_too() -> None:
    with one_rank("cpu"):
        ours = train_and_count("cpu", microbatches=2, num_steps=1, lower="eager")
        assert_same(ours, train_and_count("cpu", microbatches=2, num_steps=1, lower="eager"))
    assert (ours.captures, ours.replays, ours.skips) == ((0, 0), [0], 0)
    assert ours.grads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adds_a_product(dtype: torch.dtype) -> None:
    check_addmm_acc("cpu", dtype)


def test_refuses_products_in_bf16_for_sums_in_fp32() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        check_addmm_acc("cpu", torch.bfloat16, into=torch.float32)
