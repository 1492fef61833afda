"""Answers of a plan: what is solved for, against simulations and by hand."""

from __future__ import annotations

import functools

import pytest
import sympy
import torch

from fxshard.cost.symbols import WORLD_SIZE
from fxshard.hardware import load
from fxshard.inspect.target import Target, checked
from fxshard.plan.plan import PlanSettings
from fxshard.tools.plan.answers import (
    BlockSample,
    X,
    answers,
    crossings,
    curve,
    hidden_from,
    largest,
    latency_dominates_from,
    sample,
)
from tests.plan.models import Stack

DEVICE, WIDTH = load("h100-sxm"), 256
SETTINGS = PlanSettings(param_dtype=torch.float32, schedules=("FSDP2",))
ROWS = 4096


def build_at(batch: int, sequence: int) -> Target:
    """The stack with so many rows that compute takes longer than to launch it."""
    with torch.device("meta"):
        return checked((Stack(), (torch.empty(batch * sequence, WIDTH),)), "the builder")


@functools.cache
def sampled(batch: int, world_size: int = 16) -> BlockSample:
    return sample(build_at(batch, ROWS), world_size, DEVICE, SETTINGS)


@functools.cache
def samples() -> list[tuple[int, BlockSample]]:
    return [(batch, sampled(batch)) for batch in (8, 16, 32)]


def check_at(batch: int) -> None:
    found, there = sampled(batch), samples()
    assert curve([(x, each.cost.peak_bytes) for x, each in there]).subs(X, batch) == found.cost.peak_bytes
    for name in ("forward", "backward"):
        fitted = float(curve([(x, getattr(each, name)) for x, each in there]).subs(X, batch))
        assert fitted == pytest.approx(getattr(found, name), rel=0.02)


def check_ranks(ranks: int) -> None:
    solved = sampled(8).gather.subs(WORLD_SIZE, ranks)
    assert float(solved) == pytest.approx(float(sympy.sympify(sampled(8, ranks).gather).subs(WORLD_SIZE, ranks)))


def test_what_is_between_the_simulated_batches_is_as_simulated() -> None:
    check_at(24)
    check_ranks(64)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [9, 10, 12, 14, 18, 20, 22, 26, 28, 30])
def test_batches_are_as_simulated(batch: int) -> None:
    check_at(batch)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [24, 32, 40, 48, 80, 96, 128, 256, 512, 1024])
def test_world_sizes_are_as_simulated(ranks: int) -> None:
    check_ranks(ranks)


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    capacity = sampled(24).cost.peak_bytes + 1
    assert largest(samples(), capacity) == pytest.approx(24, abs=1e-4)


def test_communication_is_hidden_where_compute_takes_as_long() -> None:
    found, first = hidden_from(samples(), 16), samples()[0][1]
    assert found is not None
    gather, reduction = (float(each.subs(WORLD_SIZE, 16)) for each in (first.gather, first.reduction))
    forward, backward = (curve([(x, getattr(s, name)) for x, s in samples()]) for name in ("forward", "backward"))
    ratios = float(forward.subs(X, found)) / gather, float(backward.subs(X, found)) / (gather + reduction)
    assert min(ratios) == pytest.approx(1, rel=1e-6)


def test_latency_dominates_large_worlds_and_small_gathers() -> None:
    nbytes = 436e6
    ranks = latency_dominates_from(nbytes, DEVICE, 16)
    link = DEVICE.link(16)
    latency = link.latency + (ranks - 1) * link.hop
    assert latency == pytest.approx((ranks - 1) / ranks * nbytes / link.bandwidth)
    assert latency_dominates_from(1e3, DEVICE, 16) == 1


def test_crossings_are_the_positive_roots() -> None:
    assert crossings((X - 2) * (X - 5) * (X + 1)) == pytest.approx([2, 5])
    assert crossings(X**2 + 1) == []


def test_answers_are_given_in_words() -> None:
    lines = [*answers(build_at, 16, 8, ROWS, DEVICE, SETTINGS)]
    assert lines[0].startswith("a block hides its communication from batch ")
    assert lines[3].startswith("what fits has at most sequence about ")
    assert lines[4] == "the latency of a block's gather is longer than its transfer from 1 ranks on"
    assert lines[5].startswith("sharding over 8 ranks in 2 replicas: ")
