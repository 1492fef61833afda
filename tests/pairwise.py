"""Products of parameters, of which the default run takes as few as show every pair of values together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by a product of arguments; what no pair of values needs is `slow`.

    Most faults need two of the choices, few need three (Kuhn, Wallace, Gallo: Software fault interactions and
    implications for software testing, IEEE TSE 30(6), 2004).
    """
    every = list(itertools.product(*(list(values) for values in axes.values())))
    chosen = _covering(every)
    params = [pytest.param(*row, marks=() if row in chosen else pytest.mark.slow) for row in every]
    return pytest.mark.parametrize(tuple(axes), params)


def slow(*values: Any) -> ParameterSet:
    """Say that a case of a `parametrize` shows little that the others do not: it runs with `-m slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


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
