"""Quantities: numbers stay numbers, equal expressions are counted, and nothing asks a `SymInt` for its value."""

from __future__ import annotations

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard.cost.symbols import WORLD_SIZE, Point, Sum, evaluate, simplest, size_of
from fxshard.ir.liveness import UNBACKED_HINT, hint_of

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
    assert [evaluate(shard, ranks, {rows: 7}) for ranks in (1, 3, 64)] == [70, 28, 7]
    assert evaluate(rows / WORLD_SIZE, 2, {rows: 7}) == 3.5


def test_a_point_evaluates_integers_to_integers() -> None:
    point = Point(world_size=4, hints={rows: 3})
    assert (point.value(rows * WORLD_SIZE), type(point.value(rows * WORLD_SIZE))) == (12, int)
    assert point.value(2.5) == 2.5


def test_a_size_that_only_the_data_knows_counts_as_the_fallback() -> None:
    env = ShapeEnv()
    count = env.create_unbacked_symint()
    assert isinstance(count, torch.SymInt)
    assert hint_of(2 * count) == 2 * UNBACKED_HINT
    assert evaluate(size_of(2 * count), 1, {}) == 2 * UNBACKED_HINT
    assert list(env.guards) == []
