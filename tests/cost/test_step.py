"""Graphs that run one after the other, against times worked out by hand."""

from __future__ import annotations

import pytest

from fxshard.cost.sizes import sizes_of
from fxshard.cost.step import GraphOfStep, step_time
from fxshard.cost.timeline import Timeline
from fxshard.ir import tags
from tests.cost.big import WORLD_SIZE as RANKS
from tests.cost.by_hand import HARDWARE, NO_PLAN, PRODUCT, TRANSFER, HandMade, c10d

REDUCTION = TRANSFER
"""Seconds of reducing as many bytes as a gather brings."""


def block(products: int, *, reduces: bool = False) -> GraphOfStep:
    """A graph that gathers, multiplies, and may reduce what it does not wait for."""
    plan = HandMade()
    launch = plan.launch()
    tags.tag_units(launch, {"block": "0"})
    plan.wait(launch)
    for _ in range(products):
        plan.product()
    if reduces:
        plan.call(c10d.reduce_scatter_tensor.default, plan.input("gradient", (1024 * RANKS,)), "sum", RANKS, "0")
    graph = plan.finish(plan.x)
    return GraphOfStep(graph, Timeline(sizes_of(graph, NO_PLAN), HARDWARE))


def test_one_graph_takes_what_its_timeline_says() -> None:
    assert step_time([block(1)]) == (TRANSFER + PRODUCT, TRANSFER)


def test_a_graph_hides_the_first_gather_of_the_next_one() -> None:
    shared = block(3)
    assert step_time([shared, shared, shared]) == (TRANSFER + 9 * PRODUCT, TRANSFER)


def test_what_a_graph_is_too_short_to_hide_is_exposed_in_the_next_one() -> None:
    shared, exposed = block(1), TRANSFER + 2 * (TRANSFER - PRODUCT)
    assert step_time([shared, shared, shared]) == (3 * PRODUCT + exposed, exposed)


def test_gathers_reach_from_one_kind_of_graph_to_another() -> None:
    assert step_time([block(3), block(1), block(2)]) == (6 * PRODUCT + 2 * TRANSFER - PRODUCT, 2 * TRANSFER - PRODUCT)


def test_a_graph_without_gathers_hands_nothing_over() -> None:
    plan = HandMade()
    plan.product()
    graph = plan.finish(plan.x)
    between = GraphOfStep(graph, Timeline(sizes_of(graph, NO_PLAN), HARDWARE))
    assert step_time([block(3), between, block(3)]) == (7 * PRODUCT + 2 * TRANSFER, 2 * TRANSFER)


def test_a_step_ends_once_the_last_reduction_is_done() -> None:
    assert step_time([block(1, reduces=True)]) == (TRANSFER + PRODUCT + REDUCTION, TRANSFER + REDUCTION)


def test_a_gather_that_was_launched_early_goes_before_the_reduction_of_its_graph() -> None:
    shared = block(3, reduces=True)
    first_ends = TRANSFER + 3 * PRODUCT
    reduced = first_ends + REDUCTION
    second_ends = first_ends + 3 * PRODUCT
    done = max(reduced, second_ends) + REDUCTION
    assert step_time([shared, shared]) == pytest.approx((done, done - 6 * PRODUCT))


def test_nothing_takes_no_time() -> None:
    assert step_time([]) == (0.0, 0.0)
