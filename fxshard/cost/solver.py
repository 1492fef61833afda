"""Choose for each unit what its parameters and activations do, so that a step is fast and fits into memory.

[Note: the choice of policies]
A step is a row of moments. In each of them resources are busy (compute, the queue of a process group, a stream of
copies), side by side: the moment takes as long as the busiest one. Every unit has choices (gather again, keep, offload,
compute again, ...), each of which adds to what resources do and to the bytes that are held at each place of the step.
The fastest choices within a budget of bytes solve a linear program in which the variables of choices are 0 or 1:
`time[m] >= seconds[r, m]`, and the sum of times is the least. Branch and bound solves it. Where the time is up, the
better of what it has found and of a greedy descent counts, and the bound that it has proven says how far off that is.

Source: "Checkmate", https://arxiv.org/abs/1910.02653, chooses so what to compute again; the solver is HiGHS,
https://doi.org/10.1007/s12532-017-0130-5, through `scipy.optimize.milp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxshard.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = NDArray[np.float64]
Picks = tuple[int, ...]
"""For each unit the number of its choice."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """What a unit may do.

    Attributes:
        name: for reports.
        seconds: `[resources, moments]`, what each resource does for it in each moment.
        nbytes: `[places]`, what is held for it at each place of the step.
    """

    name: str
    seconds: Array
    nbytes: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyProblem:
    """What is to be chosen, see [Note: the choice of policies].

    Attributes:
        units: the choices of each unit, of which the first is what it does unless something is gained.
        seconds: `[resources, moments]`, what resources do under every choice.
        nbytes: `[places]`, what memory takes under every choice.
        times: `[moments]`, how often each moment comes in a step.
    """

    units: Sequence[Sequence[Choice]]
    seconds: Array
    nbytes: Array
    times: Array

    def step_seconds(self, picks: Picks) -> float:
        """The seconds of a step."""
        busy = self.seconds + sum(unit[pick].seconds for unit, pick in zip(self.units, picks, strict=True))
        return float(busy.max(axis=0) @ self.times)

    def peak_bytes(self, picks: Picks) -> float:
        """The most that is held at any place."""
        held = self.nbytes + sum(unit[pick].nbytes for unit, pick in zip(self.units, picks, strict=True))
        return float(held.max())


class PolicySolution(NamedTuple):
    """The choices that were found."""

    picks: Picks
    seconds: float  # of a step
    gap: float  # the share of them by which other choices within the budget could be faster at most


def solve(problem: PolicyProblem, budget: float, *, time_limit: float = 30.0) -> PolicySolution | None:
    """Find the fastest choices that hold no more than `budget` bytes; `None` if no choices do.

    After `time_limit` seconds the best that is known counts.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    found = _branch_and_bound(problem, budget, time_limit)
    known = [picks for picks in (_picks_of(problem, found.x), greedy(problem, budget)) if picks is not None]
    fitting = [picks for picks in known if problem.peak_bytes(picks) <= budget]
    if not fitting:
        return None
    best = min(fitting, key=problem.step_seconds)
    seconds, bound = problem.step_seconds(best), (found.mip_dual_bound or 0.0) * _unit_of(problem)
    return PolicySolution(best, seconds, max(0.0, 1 - bound / seconds) if seconds else 0.0)


def greedy(problem: PolicyProblem, budget: float) -> Picks | None:
    """Change one unit at a time: first what frees most bytes per second until all fits, then what is fastest per byte.

    `None` if it comes to an end before all fits.
    """
    picks: Picks = (0,) * len(problem.units)
    seconds, peak = problem.step_seconds(picks), problem.peak_bytes(picks)
    while True:
        changes = [(problem.step_seconds(p), problem.peak_bytes(p), p) for p in _neighbours(problem, picks)]
        if peak > budget:
            changes = [change for change in changes if change[1] < peak]
            best = max(changes, key=lambda c: (peak - c[1]) / max(c[0] - seconds, _TINY), default=None)
        else:
            changes = [change for change in changes if change[1] <= budget and change[0] < seconds - _TINY]
            best = max(changes, key=lambda c: (seconds - c[0]) / max(c[1] - peak, 1.0), default=None)
        if best is None:
            return picks if peak <= budget else None
        seconds, peak, picks = best


_TINY = 1e-12  # seconds


def _neighbours(problem: PolicyProblem, picks: Picks) -> Iterator[Picks]:
    """All picks that differ in one unit; of units that are alike and have picked alike, the last one."""
    seen = set()
    for i in reversed(range(len(picks))):
        for pick in range(len(problem.units[i])):
            change = (tuple(choice.name for choice in problem.units[i]), picks[i], pick)
            if pick != picks[i] and change not in seen:
                seen.add(change)
                yield (*picks[:i], pick, *picks[i + 1 :])


def _branch_and_bound(problem: PolicyProblem, budget: float, time_limit: float) -> Any:
    """Run `milp` over one variable for each choice, 0 or 1, and one for the time of each moment."""
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise MissingExtraError("scipy", "plan") from error
    choices = [choice for unit in problem.units for choice in unit]
    owner = [i for i, unit in enumerate(problem.units) for _ in unit]
    num_units, num_choices, num_moments = len(problem.units), len(choices), len(problem.times)
    scale, unit = max(float(problem.nbytes.max()), 1.0), _unit_of(problem)
    held = np.stack([choice.nbytes for choice in choices], axis=1) / scale
    busy = [np.stack(seconds, axis=1) for seconds in zip(*(choice.seconds for choice in choices), strict=True)]
    one_of_each, moment = (
        sparse.csr_array((np.ones(num_choices), (owner, range(num_choices)))),
        sparse.eye_array(num_moments),
    )
    rows = [
        [one_of_each, None],
        [sparse.csr_array(held), None],
        *([sparse.csr_array(-row / unit), moment] for row in busy),
    ]
    ones, below = np.ones(num_units), np.full(len(held), -np.inf)
    limits = optimize.LinearConstraint(
        sparse.block_array(rows, format="csr"),
        lb=np.concatenate([ones, below, problem.seconds.ravel() / unit]),
        ub=np.concatenate([ones, (budget - problem.nbytes) / scale, np.full(problem.seconds.size, np.inf)]),
    )
    is_choice = np.arange(num_choices + num_moments) < num_choices
    return optimize.milp(
        np.concatenate([np.zeros(num_choices), problem.times]),
        constraints=limits,
        integrality=is_choice,
        bounds=optimize.Bounds(0, np.where(is_choice, 1, np.inf)),
        options={"time_limit": time_limit, "mip_rel_gap": 1e-7},
    )


def _unit_of(problem: PolicyProblem) -> float:
    """Seconds that count as one, for a solver's tolerances are those of numbers around 1."""
    return problem.step_seconds((0,) * len(problem.units)) or 1.0


def _picks_of(problem: PolicyProblem, variables: Array | None) -> Picks | None:
    """The choices whose variables are 1, `None` where the solver has found nothing."""
    if variables is None:
        return None
    ends = np.cumsum([len(unit) for unit in problem.units])
    return tuple(int(np.argmax(part)) for part in np.split(variables[: ends[-1]], ends[:-1]))
