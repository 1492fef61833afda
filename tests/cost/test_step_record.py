"""What is kept of a step: kernels, launches and what is held when, against times worked out by hand."""

from __future__ import annotations

import dataclasses
import operator

import pytest
import torch

from fxshard.cost.sizes import sizes_of
from fxshard.cost.step import Clock, GraphOfStep
from fxshard.cost.step_memory import MemoryChange
from fxshard.cost.step_record import OTHER, PRODUCT, StepRecord
from fxshard.cost.timeline import Timeline
from fxshard.hardware import HardwareSpec
from fxshard.ir import tags
from tests.cost.by_hand import HARDWARE, NO_PLAN, TRANSFER, HandMade
from tests.cost.by_hand import PRODUCT as SECONDS


def gathers(products: int, *, hardware: HardwareSpec = HARDWARE) -> GraphOfStep:
    """A graph that multiplies once before it waits for what it gathers, then so many times."""
    plan = HandMade()
    launch = plan.launch()
    tags.tag_units(launch, {"block": "0"})
    plan.product()
    plan.wait(launch)
    for _ in range(products):
        plan.product()
    graph = plan.finish(plan.x)
    return GraphOfStep(graph, Timeline(sizes_of(graph, NO_PLAN), hardware), stage="forward")


def recorded(graph: GraphOfStep, times: int = 1, **given: object) -> StepRecord:
    clock = Clock()
    clock.run_all([graph] * times)
    fields = {"standing": {}, "changes": (), "seconds": clock.now, **given}
    return StepRecord(intervals=clock.intervals, runs=clock.runs, **fields)  # type: ignore[arg-type]


def test_kernels_run_in_their_order_around_a_wait() -> None:
    kernels = list(recorded(gathers(2)).kernels())
    assert [(each.start, each.end) for each in kernels] == [
        (0.0, SECONDS),
        (TRANSFER, TRANSFER + SECONDS),
        (TRANSFER + SECONDS, TRANSFER + 2 * SECONDS),
    ]
    assert {each.work.kind for each in kernels} == {PRODUCT}
    assert all(each.seconds == each.work.seconds for each in kernels)


def test_a_kernel_that_a_collective_slows_takes_longer_than_alone() -> None:
    first, second = recorded(gathers(1, hardware=dataclasses.replace(HARDWARE, collective_share=0.5))).kernels()
    assert first.seconds == pytest.approx(2 * first.work.seconds)
    assert second.seconds == pytest.approx(second.work.seconds)


def test_a_kernel_that_is_no_product_is_of_another_kind() -> None:
    plan = HandMade()
    plan.x = plan.call(torch.ops.aten.relu.default, plan.x)
    graph = plan.finish(plan.x)
    (kernel,) = recorded(GraphOfStep(graph, Timeline(sizes_of(graph, NO_PLAN), HARDWARE))).kernels()
    assert (kernel.work.kind, kernel.work.flops) == (OTHER, 0.0)
    assert kernel.work.nbytes > 0


def test_a_launch_says_when_it_was_made_and_needed_and_how_long_compute_stood() -> None:
    record = recorded(gathers(1))
    (launch,) = record.launches
    assert (launch.launched, launch.needed) == (0.0, SECONDS)
    assert launch.exposed == TRANSFER - SECONDS
    (exposed,) = record.exposed
    assert exposed == ("all_gather block", "forward", launch.name, TRANSFER - SECONDS)


def test_what_is_exposed_in_several_microbatches_is_one_launch() -> None:
    (exposed,) = recorded(gathers(1), times=3).exposed
    assert exposed.seconds == (TRANSFER - SECONDS) + 2 * (TRANSFER - 2 * SECONDS)


def test_a_late_host_is_a_wait_of_its_own_that_exposes_nothing() -> None:
    slow = dataclasses.replace(HARDWARE, host_overhead=2 * TRANSFER)
    record = recorded(gathers(1, hardware=slow))
    assert record.exposed == []
    assert [each.name for each in record.stands] == ["wait for the host"] * 2
    assert [kernel.seconds for kernel in record.kernels()] == [SECONDS, SECONDS]


def test_memory_changes_when_compute_comes_to_their_nodes() -> None:
    graph = gathers(1)
    first, second = (node for node in graph.timeline.nodes if node in graph.timeline.compute)
    made = MemoryChange(0, graph.timeline.place_of(first), False, "activations", 8)
    freed = MemoryChange(0, graph.timeline.place_of(second) + 1, False, "activations", -8)
    over = MemoryChange(-1, 0, False, "gradients", -4)
    later = MemoryChange(0, graph.timeline.place_of(second), False, "gradients", 4)
    held = recorded(graph, standing={"parameters": 2}, changes=[made, later, freed, over]).memory()
    assert held.categories == ["parameters", "activations", "gradients"]
    assert held.seconds.tolist() == [0.0, 0.0, TRANSFER, TRANSFER + SECONDS, TRANSFER + SECONDS]
    assert held.nbytes.tolist() == [[2, 0, 0], [2, 8, 0], [2, 8, 4], [2, 0, 4], [2, 0, 0]]


def test_what_a_called_graph_returns_is_made_before_it_runs_and_its_input_is_freed_behind_it() -> None:
    plan = HandMade()
    plan.product()
    node = plan.call(torch.ops.fxshard.planned_block.default, [plan.x], 0, "float32 24 64")
    plan.x = plan.call(operator.getitem, node, 0)
    plan.product()
    graph = plan.finish(plan.x)
    timeline = Timeline(sizes_of(graph, NO_PLAN), HARDWARE)
    outer = GraphOfStep(graph, timeline, {node: gathers(2)}, names={node: "layers.0"})
    place = timeline.place_of(node)
    changes = [MemoryChange(0, place, True, "x", 8), MemoryChange(0, place + 1, False, "x", -8)]
    record = recorded(outer, changes=changes)
    (launch,) = record.launches
    assert record.label(launch) == "all_gather layers.0"
    before, behind = record.memory().seconds[1:]
    assert before == SECONDS
    assert behind == pytest.approx(record.seconds - SECONDS)


def test_each_microbatch_holds_what_one_does() -> None:
    graph = gathers(1)
    product = next(node for node in graph.timeline.nodes if node in graph.timeline.compute)
    place = graph.timeline.place_of(product)
    changes = [MemoryChange(0, place, False, "x", 8), MemoryChange(0, place + 1, False, "x", -8)]
    record = recorded(graph, times=3, changes=changes, microbatches=3)
    assert record.memory().nbytes.ravel().tolist() == [0, 8, 0, 8, 0, 8, 0]
    starts = [each.start for each in record.kernels() if each.work.node is product]
    assert record.memory().seconds[1::2].tolist() == pytest.approx(starts)
