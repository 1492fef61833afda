"""Products of parameters, of which the default run takes as few as show every pair of values together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by a product of arguments; what no pair of values needs is `slow`.

    Most faults need two of the choices, few need three (Kuhn, Wallace, Gallo: Software fault interactions and
    implications for software testing, IEEE TSE 30(6), 2004).
    """
    return _product(axes, _covering(list(itertools.product(*axes.values()))))


def each_once(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by a product of arguments that meet in no line of fxshard; what no value needs is `slow`."""
    values = [list(axis) for axis in axes.values()]
    return _product(axes, [tuple(axis[i % len(axis)] for axis in values) for i in range(max(map(len, values)))])


def slow(*values: Any) -> ParameterSet:
    """Say that a case of a `parametrize` shows little that the others do not: it runs with `-m slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def _product(axes: Mapping[str, Iterable[Any]], chosen: Sequence[tuple[Any, ...]]) -> pytest.MarkDecorator:
    every = itertools.product(*axes.values())
    return pytest.mark.parametrize(tuple(axes), [pytest.param(*row) if row in chosen else slow(*row) for row in every])


def _covering(every: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows that hold every pair of values that is in any row, each time the one with the most new pairs."""
    missing = {pair for row in every for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(every, key=lambda row: len(missing.intersection(_pairs(row))))
        missing.difference_update(_pairs(best))
        chosen.append(best)
    return chosen


def _pairs(row: tuple[Any, ...]) -> list[tuple[tuple[int, Any], tuple[int, Any]]]:
    return list(itertools.combinations(enumerate(row), 2))
