"""Where a row of parameters is cut into launches."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.cost import bucket_sizes
from fxshard.hardware import BUILTIN

BIAS, MOST = 1, 100


@pytest.mark.parametrize(
    ("sizes", "spans"),
    [
        ([60, 60], [[60], [60]]),
        ([60, 30, 60], [[60, 30], [60]]),
        ([60, BIAS, 60, BIAS], [[60, BIAS], [60, BIAS]]),  # a bias stays with its weight
        ([100, BIAS, 60], [[100], [BIAS, 60]]),  # but for what is full
        ([300, 50], [[300], [50]]),
        ([10, 10], [[10, 10]]),
        ([], []),
    ],
)
def test_cuts_where_a_large_thing_begins(sizes: list[int], spans: list[list[int]]) -> None:
    assert bucket_sizes.split(sizes, int, MOST) == spans


@given(st.lists(st.integers(1, 150)))
def test_loses_nothing_and_fills_no_span_beyond_the_most(sizes: list[int]) -> None:
    spans = bucket_sizes.split(sizes, int, MOST)
    assert [size for span in spans for size in span] == sizes
    assert all(len(span) == 1 or sum(span) <= MOST for span in spans)


@pytest.mark.parametrize(
    ("things", "spans"),
    [
        ([1, 2, 11, 12], [[1, 2], [11, 12]]),
        ([1, 11, 21], [[1], [11], [21]]),
        ([11, 1], [[11], [1]]),
        ([], []),
    ],
)
def test_cuts_where_things_are_apart(things: list[int], spans: list[list[int]]) -> None:
    assert bucket_sizes.cut(things, lambda thing: 10, lambda a, b: a // 10 != b // 10, least=10) == spans


@pytest.mark.parametrize(
    ("sizes", "spans"), [([50, 5, 50], [[50, 5], [50]]), ([5, 50], [[5, 50]]), ([5, 5, 5], [[5, 5, 5]])]
)
def test_makes_no_span_of_less_than_asked_for(sizes: list[int], spans: list[list[int]]) -> None:
    assert bucket_sizes.cut(sizes, int, lambda a, b: True, least=15) == spans


def test_a_link_without_latency_has_each_thing_go_by_itself() -> None:
    limits = bucket_sizes.auto_limits(dataclasses.replace(BUILTIN["cpu"], link_latency=0.0), world_size=4)
    assert bucket_sizes.split([60, 1, 60], int, limits.most) == [[60], [1], [60]]


def test_a_ring_over_more_ranks_needs_larger_launches() -> None:
    ring = dataclasses.replace(BUILTIN["cpu"], link_latency=1e-4, hop_latency=1e-5)
    two, eleven = (bucket_sizes.auto_limits(ring, ranks) for ranks in (2, 11))
    assert two.latency == pytest.approx(1.1e-4)
    assert eleven.latency == pytest.approx(2e-4)
    assert eleven.enough > 1.6 * two.enough * (1 / 2) / (10 / 11)  # by what each byte takes on the link


def test_what_a_launch_costs_the_rank_counts_as_latency() -> None:
    quick = dataclasses.replace(BUILTIN["cpu"], link_latency=1e-4)
    dear = dataclasses.replace(quick, launch_overhead=1e-4)
    assert bucket_sizes.auto_limits(dear, 2).enough == pytest.approx(2 * bucket_sizes.auto_limits(quick, 2).enough)
