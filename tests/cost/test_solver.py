"""The solver against all choices that there are, and against simpler ways to choose."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from fxshard.cost.solver import Choice, Picks, PolicyProblem, greedy, solve
from fxshard.errors import MissingExtraError
from tests.cost.problems import random_problem


def budget_of(problem: PolicyProblem, share: float) -> float:
    """Between what the choices with the fewest bytes hold and those with the most."""
    ends = [
        problem.peak_bytes(tuple(of(range(len(u)), key=lambda i, u=u: u[i].nbytes.sum()) for u in problem.units))  # type: ignore[misc]
        for of in (min, max)
    ]
    return ends[0] + share * (ends[1] - ends[0])


def best_of_all(problem: PolicyProblem, budget: float) -> float | None:
    every: itertools.product[Picks] = itertools.product(*(range(len(unit)) for unit in problem.units))
    return min((problem.step_seconds(p) for p in every if problem.peak_bytes(p) <= budget), default=None)


@pytest.mark.parametrize("seed", range(50))
def test_small_problems_are_solved_as_by_trying_all_choices(seed: int) -> None:
    problem = random_problem(seed, units=5, choices=4)
    budget = budget_of(problem, share=seed % 10 / 10)
    found, best = solve(problem, budget), best_of_all(problem, budget)
    assert best is not None
    assert found is not None
    assert found.seconds == pytest.approx(best, rel=1e-6)
    assert problem.peak_bytes(found.picks) <= budget
    assert found.gap == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("seed", range(30))
def test_no_simpler_way_to_choose_is_faster(seed: int) -> None:
    problem = random_problem(100 + seed, units=40, choices=5)
    budget = budget_of(problem, share=(1 + seed % 9) / 10)
    found = solve(problem, budget, time_limit=5)
    assert found is not None
    same = [tuple(min(number, len(unit) - 1) for unit in problem.units) for number in range(5)]
    others = [picks for picks in (*same, greedy(problem, budget)) if picks and problem.peak_bytes(picks) <= budget]
    assert others
    assert found.seconds <= min(map(problem.step_seconds, others)) * (1 + 1e-9)
    assert 0 <= found.gap < 0.01


def test_what_cannot_fit_has_no_solution() -> None:
    problem = random_problem(0, units=5, choices=3)
    assert best_of_all(problem, 1.0) is None
    assert solve(problem, 1.0) is None
    assert greedy(problem, 1.0) is None


def test_without_time_the_greedy_choices_count_and_the_gap_says_what_is_not_proven() -> None:
    problem = random_problem(7, units=40, choices=5)
    budget = budget_of(problem, 0.3)
    found, chosen = solve(problem, budget, time_limit=1e-6), greedy(problem, budget)
    assert found is not None
    assert chosen is not None
    assert found.seconds <= problem.step_seconds(chosen)
    assert 0 < found.gap <= 1


def kept_or_not(moments: int, unit: int) -> list[Choice]:
    """Gathering again takes the link one second in backward, keeping holds one byte until then."""
    again, held = np.zeros((2, moments)), np.zeros(moments)
    again[1, moments - 1 - unit] = 1.0
    held[unit : moments - unit] = 1.0
    nothing = np.zeros(moments)
    return [
        Choice(name="reshard", seconds=again, nbytes=nothing),
        Choice(name="keep", seconds=np.zeros_like(again), nbytes=held),
    ]


def test_of_units_that_are_alike_those_are_kept_whose_gathers_are_exposed() -> None:
    seconds = np.zeros((2, 6))
    seconds[0] = [1, 1, 1, 0.25, 1, 1]  # the third unit's backward has no compute that could hide a gather
    problem = PolicyProblem(
        units=[kept_or_not(6, unit) for unit in range(3)], seconds=seconds, nbytes=np.zeros(6), times=np.ones(6)
    )
    found = solve(problem, budget=1)
    assert found is not None
    assert (found.picks, found.seconds) == ((0, 0, 1), 5.25)


def test_moments_that_come_more_often_decide() -> None:
    problem = PolicyProblem(
        units=[kept_or_not(4, unit) for unit in range(2)],
        seconds=np.zeros((2, 4)),
        nbytes=np.zeros(4),
        times=np.array([1.0, 1.0, 1.0, 5.0]),
    )
    found = solve(problem, budget=1)
    assert found is not None
    assert (found.picks, found.seconds) == ((1, 0), 1.0)


def test_without_scipy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(
        MissingExtraError, match=r"scipy is not installed. Type: python -m pip install 'fxshard\[plan\]'"
    ):
        solve(random_problem(0, units=2, choices=2), 1e3)
