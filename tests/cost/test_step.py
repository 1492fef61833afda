"""Graphs that run one after the other, against times worked out by hand."""

import dataclasses
import operator
from typing import Any

import pytest
import torch

from fxshard.cost.sizes import sizes_of
from fxshard.cost.step import Clock, GraphOfStep, step_time
from fxshard.cost.timeline import Timeline
from fxshard.hardware import HardwareSpec
from fxshard.ir import tags
from tests.cost.big import WORLD_SIZE as RANKS
from tests.cost.by_hand import HARDWARE, NO_PLAN, PRODUCT, TRANSFER, HandMade, c10d

planned_block = torch.ops.fxshard.planned_block.default

REDUCTION = TRANSFER
"""Seconds of reducing as many bytes as a gather brings."""


def finished(plan: HandMade, hardware: HardwareSpec = HARDWARE, **kwargs: Any) -> GraphOfStep:
    graph = plan.finish(plan.x)
    return GraphOfStep(graph, Timeline(sizes_of(graph, NO_PLAN), hardware), **kwargs)


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
    return finished(plan)


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
    assert step_time([block(3), finished(plan), block(3)]) == (7 * PRODUCT + 2 * TRANSFER, 2 * TRANSFER)


def test_a_step_ends_once_the_last_reduction_is_done() -> None:
    assert step_time([block(1, reduces=True)]) == (TRANSFER + PRODUCT + REDUCTION, TRANSFER + REDUCTION)


def test_a_gather_that_was_launched_early_goes_before_the_reduction_of_its_graph() -> None:
    shared = block(3, reduces=True)
    first_ends = TRANSFER + 3 * PRODUCT
    reduced = first_ends + REDUCTION
    second_ends = first_ends + 3 * PRODUCT
    done = max(reduced, second_ends) + REDUCTION
    assert step_time([shared, shared]) == pytest.approx((done, done - 6 * PRODUCT))


@pytest.mark.parametrize("at_once", [False, True])
def test_compute_stands_until_a_reduction_is_done_where_nothing_else_carries_it(at_once: bool) -> None:
    plan = HandMade()
    plan.call(c10d.reduce_scatter_tensor.default, plan.input("gradient", (1024 * RANKS,)), "sum", RANKS, "0")
    plan.product()
    shared = finished(plan, reduces_at_once=at_once)
    clock = Clock()
    clock.run_all([shared, shared])
    assert clock.now == pytest.approx(2 * (PRODUCT + REDUCTION) if at_once else max(2 * REDUCTION, 2 * PRODUCT))


def test_on_a_cpu_compute_stands_while_it_launches() -> None:
    plan = HandMade()
    first = plan.call(c10d.all_gather_into_tensor_coalesced.default, [plan.flat, plan.flat], RANKS, "0")
    for i in range(2):
        plan.wait(plan.call(operator.getitem, first, i))
    graph = plan.finish(plan.x)
    seconds = []
    for name in ("cpu", "gpu"):
        device = dataclasses.replace(HARDWARE, name=name, launch_overhead=0.25, gather_tensor_overhead=0.5)
        clock = Clock()
        clock.run_all([GraphOfStep(graph, Timeline(sizes_of(graph, NO_PLAN), device))])
        seconds.append(clock.now)
    assert seconds[0] - seconds[1] == 0.75


def test_the_graph_before_makes_all_launches_of_the_first_unit() -> None:
    plan = HandMade()
    for number in range(2):  # the second one stands behind the compute of the first
        launch = plan.launch()
        tags.tag_units(launch, {"block": "0"})
        plan.wait(launch)
        for _ in range(1 + number):
            plan.product()
    of_step = finished(plan)
    first, second = (node for node in plan.graph.nodes if node in of_step.timeline.launches)
    assert (of_step.ahead, of_step.last) == ((first, second), second)
    assert step_time([of_step]) == (2 * TRANSFER + 3 * PRODUCT, 2 * TRANSFER)
    assert step_time([block(4), of_step]) == (TRANSFER + 7 * PRODUCT, TRANSFER)  # 4 products hide both


def test_nothing_takes_no_time() -> None:
    assert step_time([]) == (0.0, 0.0)


def called(inner: GraphOfStep, count: int, hardware: HardwareSpec = HARDWARE) -> GraphOfStep:
    """A graph that calls `inner` so many times, with a product before each and one at the end."""
    plan, calls = HandMade(), {}
    for number in range(count):
        plan.product()
        node = plan.call(planned_block, [plan.x], number, "float32 24 64")
        calls[node] = inner
        plan.x = plan.call(operator.getitem, node, 0)
    plan.product()
    return finished(plan, hardware, calls=calls)


def test_a_graph_that_calls_others_stands_still_while_they_run_and_begins_their_first_gather() -> None:
    assert step_time([called(block(3), 2)]) == (9 * PRODUCT + TRANSFER - PRODUCT, TRANSFER - PRODUCT)


def test_compute_is_slower_while_a_collective_runs() -> None:
    half = dataclasses.replace(HARDWARE, collective_share=0.5)
    plan = HandMade()
    launch = plan.launch()
    plan.product()
    plan.product()
    plan.wait(launch)
    plan.product()
    graphs, clock = [finished(plan, half)], Clock()
    clock.run_all(graphs)
    assert clock.now == pytest.approx(TRANSFER + (2 * PRODUCT - TRANSFER / 2) + PRODUCT)
    assert step_time(graphs) == (TRANSFER + PRODUCT, TRANSFER - 2 * PRODUCT)


def test_compute_waits_for_a_host_that_is_slower() -> None:
    slow = dataclasses.replace(HARDWARE, host_overhead=2 * PRODUCT)
    plan = HandMade()
    for _ in range(4):
        plan.product()
    graphs, clock = [finished(plan, slow)], Clock()
    clock.run_all(graphs)
    assert clock.now == 8 * PRODUCT
    assert step_time(graphs).seconds == 4 * PRODUCT


def test_microbatches_that_do_not_reduce_launch_no_reduction() -> None:
    clock = Clock()
    clock.run_all([block(3, reduces=True)], microbatches=3, reduces_each=False)
    names = [each.name for each in clock.intervals if each.stream == "0"]
    assert sum(name.startswith("reduce_scatter") for name in names) == 1
    assert sum(name.startswith("all_gather") for name in names) == 3


def test_exposed_time_is_told_by_what_compute_waits_for() -> None:
    clock = Clock()
    clock.run_all([block(1, reduces=True)])
    assert clock.exposed_by == {"all_gather": TRANSFER, "the last launches": REDUCTION}


def test_parameters_that_are_copied_out_take_time_behind_their_gather() -> None:
    slow = dataclasses.replace(HARDWARE, memory_bandwidth=2.0**14)  # 16 KiB are read and written in two seconds
    plan = HandMade()
    plan.wait(plan.launch())
    graph = plan.finish(plan.x)
    launches = {node: {"block": "0"} for node in graph.nodes if "all_gather" in node.name}
    for node, units in launches.items():
        tags.tag_units(node, units)
    timeline = Timeline(sizes_of(graph, NO_PLAN), slow)
    plain, copying = (GraphOfStep(graph, timeline, copies_out=copies) for copies in (False, True))
    assert step_time([copying]).seconds - step_time([plain]).seconds == pytest.approx(2.0)
