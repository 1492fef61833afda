"""Sizes as quantities: numbers stay numbers, and storages and launches follow the world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard.cost.comm import launches_of
from fxshard.cost.sizes import sizes_of
from fxshard.cost.stats import peak_bytes
from fxshard.cost.symbols import WORLD_SIZE, Point, Sum, evaluate, simplest, size_of
from fxshard.hardware import load
from fxshard.ir.liveness import UNBACKED_HINT, hint_of
from fxshard.ir.plan import FramePlan
from fxshard.passes._base import GraphKind
from fxshard.passes.insert_collectives import InsertCollectives
from tests import graphs, nodes
from tests.cost.big import Builder

c10d = torch.ops._c10d_functional

EVERY_UNIT = [
    graphs.two_layers,
    graphs.uneven,
    graphs.two_dtypes,
    graphs.doubles,
    graphs.mixed_precision,
    graphs.frozen_weight,
    graphs.called_twice,
    graphs.scalar,
]
Make = Callable[..., graphs.Traced]


def bytes_of_launches(traced: graphs.Traced, kind: GraphKind, world_size: int) -> dict[str, Any]:
    gm, ctx = traced.at(kind, after=InsertCollectives)
    sizes = sizes_of(gm.graph, ctx.plan)
    at = Point(world_size=world_size, hints={})
    return {launch.node.name: at.value(launch.nbytes) for launch in launches_of(sizes, load("h100")).values()}


@pytest.mark.parametrize("make", EVERY_UNIT)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_bytes_of_a_launch_at_another_world_size_are_those_of_a_graph_traced_there(
    make: Make, kind: GraphKind
) -> None:
    here, there = bytes_of_launches(make(), kind, 8), bytes_of_launches(make(world_size=8), kind, 8)
    assert here == there
    assert len(here) > 0


@pytest.mark.parametrize("make", EVERY_UNIT)
def test_the_peak_of_forward_at_another_world_size_is_that_of_a_graph_traced_there(make: Make) -> None:
    peaks = []
    for world_size in (2, 4):
        gm, ctx = make(world_size=world_size).at("forward", after=InsertCollectives)
        peaks.append(Point(world_size=4, hints={}).value(peak_bytes(sizes_of(gm.graph, ctx.plan))))
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("make", EVERY_UNIT)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_at_the_traced_world_size_memory_is_what_the_fake_tensors_say(make: Make, kind: GraphKind) -> None:
    gm, ctx = make().at(kind, after=InsertCollectives)
    sizes = sizes_of(gm.graph, ctx.plan)
    traced = nodes.live_bytes(gm.graph)
    assert sizes.point.value(peak_bytes(sizes)) == max(traced.values())


def test_a_unit_of_which_only_some_gradients_are_reduced_is_matched_by_its_tags() -> None:
    class HalfUsed(graphs.Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.bias

    gm, ctx = graphs.trace(HalfUsed()).at("backward", after=InsertCollectives)
    (launch,) = launches_of(sizes_of(gm.graph, ctx.plan), load("h100")).values()
    assert launch.nbytes.subs(WORLD_SIZE, 2) == graphs.WIDTH * 4
    assert launch.nbytes.subs(WORLD_SIZE, 3) == 3 * 2 * 4


def test_a_launch_that_no_plan_knows_keeps_its_traced_bytes() -> None:
    build = Builder()
    x = build.input("x", (24, 8))
    reduced = build.wait(build.call(c10d.all_reduce.default, x, "sum", "tensor_parallel"))
    sizes = sizes_of(build.finish(reduced), FramePlan(units={}, shard_inputs={}))
    (launch,) = launches_of(sizes, load("h100")).values()
    assert (launch.op, launch.unit, launch.group, launch.nbytes) == ("all_reduce", None, "tensor_parallel", 24 * 8 * 4)


def test_a_coalesced_launch_counts_all_its_tensors() -> None:
    gm, ctx = graphs.frozen_weight().at("forward", after=InsertCollectives)
    (launch,) = launches_of(sizes_of(gm.graph, ctx.plan), load("h100")).values()
    assert (launch.op, launch.unit, launch.dtype) == ("all_gather", "", "f32")
    assert launch.nbytes.subs(WORLD_SIZE, 2) == graphs.WIDTH**2 * 4 + graphs.WIDTH * 4


rows = sympy.Symbol("rows", integer=True, positive=True)


def test_numbers_add_up_to_a_number() -> None:
    assert (type(Sum([1, 2, 3]).total), Sum([1, 2, 3]).total) == (int, 6)
    assert (type(Sum([1, 0.5]).total), Sum([1, 0.5]).total) == (float, 1.5)


def test_equal_expressions_are_counted_and_may_cancel() -> None:
    total = Sum([rows, rows, 3])
    assert total.total == 2 * rows + 3
    total.add(rows, -2)
    assert total.total == 3


def test_an_expression_without_symbols_is_a_plain_number() -> None:
    assert (type(simplest(sympy.Integer(4))), simplest(sympy.Integer(4))) == (int, 4)
    assert type(simplest(sympy.Float(0.5) * 3)) is float


def test_the_world_size_and_the_hints_give_the_value() -> None:
    shard = sympy.ceiling(sympy.Integer(10) / WORLD_SIZE) * rows
    assert [evaluate(shard, ranks, {rows.name: 7}) for ranks in (1, 3, 64)] == [70, 28, 7]
    assert evaluate(rows / WORLD_SIZE, 2, {rows.name: 7}) == 3.5


def test_a_point_evaluates_integers_to_integers() -> None:
    point = Point(world_size=4, hints={rows.name: 3})
    assert (point.value(rows * WORLD_SIZE), type(point.value(rows * WORLD_SIZE))) == (12, int)
    assert point.value(2.5) == 2.5


def test_a_size_that_only_the_data_knows_counts_as_the_fallback() -> None:
    env = ShapeEnv()
    count = env.create_unbacked_symint()
    assert isinstance(count, torch.SymInt)
    assert hint_of(2 * count) == 2 * UNBACKED_HINT
    assert evaluate(size_of(2 * count), 1, {}) == 2 * UNBACKED_HINT
    assert list(env.guards) == []
