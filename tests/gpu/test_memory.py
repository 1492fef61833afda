"""Steps take the memory that their explanation says, allocate alike, wait for nothing, and read nothing freed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.gpu.checks import GROUPS, on_link, one_rank
from tests.gpu.memory import graph_peaks
from tests.gpu.poison import check_poison, poison_reaches_a_side_stream
from tests.gpu.steady import STREAMS, samples_of_steps, steps_without_synchronising, unsteady

pytestmark = pytest.mark.gpu

SLOW_LINK = {"gigabytes_per_s": 2.0, "latency_us": 50.0}
"""A block of the steady model, 4.2 MB in fp32, is under way for two milliseconds."""


@pytest.mark.parametrize("options", [{}, {"prefetch": "off"}, {"prefetch": 2}, {"bucket": "auto"}], ids=str)
def test_interpreted_graphs_take_what_their_explanation_says(options: dict[str, Any]) -> None:
    with on_link("cuda"):
        peaks = graph_peaks("cuda", width=4096, rows=2048, lower="eager", **options)
    for stage, peak in peaks.items():
        assert peak.measured == pytest.approx(peak.expected, rel=0.05), (stage, peak)


@pytest.mark.parametrize("options", [{}, {"prefetch": 2}], ids=str)
def test_compiled_code_takes_no_more_than_its_explanation_says(options: dict[str, Any]) -> None:
    with on_link("cuda"):
        peaks = graph_peaks("cuda", width=4096, rows=2048, lower="inductor", **options)
    for stage, peak in peaks.items():
        assert peak.measured <= 1.05 * peak.expected, (stage, peak)


@pytest.mark.parametrize("group", GROUPS)
def test_a_steady_step_synchronises_with_nothing(group: str) -> None:
    with GROUPS[group]("cuda"):
        losses = steps_without_synchronising("cuda")
    assert all(loss.isfinite() for loss in losses)


@pytest.mark.parametrize("streams", ["side", "off"])
def test_a_steady_step_synchronises_with_nothing_whatever_the_streams(streams: str) -> None:
    with on_link("cuda", **SLOW_LINK):
        steps_without_synchronising("cuda", streams=streams)


@pytest.mark.parametrize("options", [{}, {"streams": "side"}, {"cudagraphs": True}], ids=str)
def test_two_hundred_steps_allocate_alike(options: dict[str, Any]) -> None:
    group: AbstractContextManager[object] = one_rank("cuda") if "cudagraphs" in options else on_link("cuda")
    with group:
        samples = samples_of_steps("cuda", num_steps=200, **options)
    assert unsteady(samples) == []


def test_poison_reaches_what_a_side_stream_is_to_read() -> None:
    assert poison_reaches_a_side_stream()


@pytest.mark.parametrize(
    ("streams", "lower"), [*((each, "inductor") for each in ("auto", *STREAMS)), ("auto", "eager"), ("side", "eager")]
)
def test_no_memory_is_freed_while_a_stream_reads_it(streams: str, lower: str) -> None:
    with on_link("cuda", **SLOW_LINK):
        check_poison("cuda", streams=streams, lower=lower)
