"""The simulation, against schedules worked out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fxshard.cost.comm import exchange_between_nodes, transfer_seconds
from fxshard.cost.sizes import sizes_of
from fxshard.cost.symbols import WORLD_SIZE, Point, Quantity, Sum, hints_of
from fxshard.cost.timeline import Timeline, Transfer
from fxshard.hardware import load
from tests.cost.big import WORLD_SIZE as RANKS
from tests.cost.by_hand import HARDWARE, NO_PLAN, PRODUCT, TRANSFER, HandMade, aten, c10d


@dataclass(frozen=True, kw_only=True)
class Result:
    total: Quantity
    exposed: Quantity
    transfers: list[Transfer]


class Schedule(HandMade):
    def run(self, moved: Mapping[fx.Node, fx.Node] | None = None) -> Result:
        timeline = Timeline(sizes_of(self.finish(self.x), NO_PLAN), HARDWARE)
        timing = timeline.run(moved)
        exposed = timeline.exposed(timing)
        computing = Sum(cost.seconds for node, cost in timeline.compute.items() if node not in timeline.queues).total
        return Result(total=computing + exposed, exposed=exposed, transfers=list(timing.transfers.values()))


def times(result: Result) -> list[tuple[float, float, float]]:
    return [(t.start, t.end, t.exposed) for t in result.transfers]


def test_compute_waits_for_a_launch_that_waits_itself() -> None:
    plan = Schedule()
    plan.product()
    exchange = plan.graph.call_function(torch.ops._dtensor.shard_dim_alltoall.default, (plan.x, 0, 1, "0"))
    exchange.meta["val"] = torch.empty_like(plan.x.meta["val"])
    plan.x = exchange
    plan.product()
    result = plan.run()
    assert result.transfers == []
    assert result.exposed == pytest.approx(1.0)  # the latency: no plan says how many ranks there are
    assert result.total == pytest.approx(2 * PRODUCT + result.exposed)


def test_without_prefetch_every_transfer_is_exposed() -> None:
    plan = Schedule()
    plan.wait(plan.launch())
    plan.product()
    result = plan.run()
    assert (result.total, result.exposed) == (TRANSFER + PRODUCT, TRANSFER)
    assert times(result) == [(0, TRANSFER, TRANSFER)]


def test_a_product_between_launch_and_wait_hides_its_own_time() -> None:
    plan = Schedule()
    launch = plan.launch()
    plan.product()
    plan.wait(launch)
    plan.product()
    result = plan.run()
    assert (result.total, result.exposed) == (TRANSFER + PRODUCT, TRANSFER - PRODUCT)


def test_enough_compute_hides_a_transfer_completely() -> None:
    plan = Schedule()
    launch = plan.launch()
    for _ in range(3):
        plan.product()
    plan.wait(launch)
    result = plan.run()
    assert (result.total, result.exposed) == (3 * PRODUCT, 0)


def test_launches_of_one_group_run_one_after_the_other() -> None:
    plan = Schedule()
    first, second = plan.launch(), plan.launch()
    plan.wait(first)
    plan.product()
    plan.wait(second)
    result = plan.run()
    assert times(result) == [(0, TRANSFER, TRANSFER), (TRANSFER, 2 * TRANSFER, TRANSFER - PRODUCT)]
    assert (result.total, result.exposed) == (2 * TRANSFER, 2 * TRANSFER - PRODUCT)


def test_launches_of_two_groups_run_at_the_same_time() -> None:
    plan = Schedule()
    first, second = plan.launch("0"), plan.launch("1")
    plan.wait(first)
    plan.product()
    plan.wait(second)
    result = plan.run()
    assert times(result) == [(0, TRANSFER, TRANSFER), (0, TRANSFER, 0)]
    assert (result.total, result.exposed) == (TRANSFER + PRODUCT, TRANSFER)


def test_a_launch_starts_no_earlier_than_the_program_reaches_it() -> None:
    plan = Schedule()
    plan.product()
    plan.wait(plan.launch())
    assert times(plan.run()) == [(PRODUCT, PRODUCT + TRANSFER, TRANSFER)]


def test_a_transfer_that_nothing_waits_for_holds_nobody_up() -> None:
    plan = Schedule()
    plan.launch()
    plan.product()
    result = plan.run()
    assert (result.total, result.exposed) == (PRODUCT, 0)


def test_a_symbolic_schedule_gives_the_expression_of_the_branch_taken() -> None:
    plan = Schedule(dynamic=True)
    launch = plan.launch()
    plan.product()
    plan.wait(launch)
    plan.product()
    result = plan.run()
    (rows,) = result.exposed.free_symbols
    assert [float(result.exposed.subs(rows, n)) for n in (24, 8)] == [TRANSFER - PRODUCT, TRANSFER - 1]
    assert float(result.total.subs(rows, 24)) == TRANSFER + PRODUCT


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.sampled_from(["launch 0", "launch 1", "product", "wait"]), max_size=16),
    dynamic=st.booleans(),
)
def test_exposed_time_is_what_compute_stands_at_waits_whatever_the_schedule(steps: list[str], dynamic: bool) -> None:
    plan, in_flight = Schedule(dynamic=dynamic), list[fx.Node]()
    for step in steps:
        if step.startswith("launch"):
            in_flight.append(plan.launch(step[-1]))
        elif step == "product":
            plan.product()
        elif in_flight:
            plan.wait(in_flight.pop(0))
    result = plan.run()
    at = Point(world_size=1, hints=hints_of(plan.graph))
    exposed = at.value(result.exposed)
    assert exposed == pytest.approx(sum(transfer.exposed for transfer in result.transfers))
    assert all(t.end - t.start == TRANSFER and 0 <= t.exposed <= t.end for t in result.transfers)
    for group in "01":
        mine = [t for t in result.transfers if t.node.args[2] == group]
        assert all(a.end <= b.start for a, b in itertools.pairwise(mine))


def test_a_launch_counts_where_it_is_moved_to() -> None:
    moved, there = Schedule(), Schedule()
    place = moved.product()
    launch = moved.launch()
    there.launch()
    there.wait(there.product().prev)
    moved.wait(launch)
    found, expected = moved.run({launch: place}), there.run()
    assert times(found) == times(expected) == [(0, TRANSFER, TRANSFER - PRODUCT)]
    assert (found.total, found.exposed) == (expected.total, expected.exposed)


def test_a_tensor_that_is_reduced_twice_is_waited_for_twice() -> None:
    plan = Schedule()
    for _ in range(2):
        plan.wait(plan.call(c10d.all_reduce_.default, plan.flat, "sum", "0"))
        plan.product()
    assert times(plan.run()) == [(0, 1, 1), (1 + PRODUCT, 2 + PRODUCT, 1)]


def test_a_launch_waits_for_a_cast_on_a_side_stream_while_compute_goes_on() -> None:
    plan = Schedule()
    cast = plan.call(aten.mm.default, plan.x, plan.weight, stream="copy_in")
    launch = plan.call(c10d.all_gather_into_tensor.default, cast, RANKS, "0")
    plan.product()
    plan.wait(launch)
    result = plan.run()
    assert times(result) == [(0, PRODUCT, 0), (PRODUCT, PRODUCT + 10, 10)]
    assert (result.total, result.exposed) == (PRODUCT + 10, 10)


def test_a_copy_on_a_side_stream_begins_behind_its_launch_and_is_waited_for_in_its_place() -> None:
    plan = Schedule()
    buffer = plan.call(aten.view.default, plan.launch(), [64, 64])
    copy = plan.call(aten.mm.default, plan.x, buffer, stream="copy_out")
    plan.product()
    plan.wait(copy)
    result = plan.run()
    assert times(result) == [(0, TRANSFER, TRANSFER), (TRANSFER, TRANSFER + PRODUCT, 0)]
    assert (result.total, result.exposed) == (TRANSFER + PRODUCT, TRANSFER)


LINK = HARDWARE.link(4)


def test_an_all_reduce_moves_its_buffer_twice() -> None:
    once = transfer_seconds("reduce_scatter", 16384, 4, LINK)
    twice = transfer_seconds("all_reduce", 16384, 4, LINK)
    assert (once, twice) == (7.0, 13.0)


def test_the_time_of_a_transfer_grows_with_the_world_size_to_a_limit() -> None:
    seconds = transfer_seconds("all_gather", 16384, WORLD_SIZE, LINK)
    assert [float(seconds.subs(WORLD_SIZE, ranks)) for ranks in (1, 4)] == [1, TRANSFER]
    assert float(seconds.subs(WORLD_SIZE, 10**9)) == pytest.approx(9)


def test_an_exchange_between_nodes_has_each_rank_s_part_of_the_network() -> None:
    device, nbytes, ranks = load("h100-sxm"), 2**30, 64
    network = device.network_bandwidth
    assert network
    found = exchange_between_nodes(nbytes, ranks, device) - device.link_latency - device.network_latency
    assert found == pytest.approx(nbytes * (ranks - 8) / ranks / network)
    assert found > 6 * transfer_seconds("all_to_all", nbytes, ranks, device.link(ranks))
