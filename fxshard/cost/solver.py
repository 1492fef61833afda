"""Choose for each unit what its parameters and activations do, so that a step is fast and fits into memory.

[Note: the choice of policies]
A step is a row of moments. In each of them resources are busy (compute, the queue of a process group, a stream of
copies), side by side: the moment takes as long as the busiest one. Every unit has choices (gather again, keep, offload,
compute again, ...), each of which adds to what resources do and to the bytes that are held at each place of the step.
The fastest choices within a budget of bytes solve a linear program in which the variables of choices are 0 or 1:
`time[m] >= seconds[r, m]`, and the sum of times is the least. Places that never hold more than some other one, and
resources that are never busier in a moment than some other one, are left out before, which leaves few of a model's
blocks. Branch and bound solves that. Where the time is up, the better of what it has found and of a greedy descent
counts, and the bound that it has proven says how far off that is.

Source: "Checkmate", https://arxiv.org/abs/1910.02653, chooses so what to compute again; the solver is HiGHS,
https://doi.org/10.1007/s12532-017-0130-5, through `scipy.optimize.milp`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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
    """What a unit may do."""

    name: str  # for reports
    seconds: Array  # `[resources, moments]`, what each resource does for it in each moment
    nbytes: Array  # `[places]`, what is held for it at each place of the step


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyProblem:
    """What is to be chosen, see [Note: the choice of policies]."""

    # the choices of each unit, of which the first is what it does unless something is gained
    units: Sequence[Sequence[Choice]]
    seconds: Array  # `[resources, moments]`, what resources do under every choice
    nbytes: Array  # `[places]`, what memory takes under every choice
    times: Array  # `[moments]`, how often each moment comes in a step

    @functools.cached_property
    def flat(self) -> tuple[list[int], NDArray[np.int64], Array, Array]:
        """How many choices each unit has, the first of each, and `seconds` and `nbytes` of all of them."""
        counts = [len(unit) for unit in self.units]
        pairs = ((choice.seconds, choice.nbytes) for unit in self.units for choice in unit)
        seconds, nbytes = (np.stack(each) for each in zip(*pairs, strict=True))
        return counts, np.cumsum([0, *counts[:-1]]), seconds, nbytes

    @functools.cached_property
    def decisive(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """`[places]` and `[moments, resources]`: those that may hold most, or take longest, for some choices."""
        _, starts, busy, held = self.flat
        of_moments = zip(self.seconds.T, busy.transpose(2, 0, 1), strict=True)
        return _decisive(self.nbytes, held, starts), np.stack([_decisive(*each, starts) for each in of_moments])

    def totals(self, picks: Picks) -> tuple[Array, Array]:
        """`seconds` and `nbytes` with what the picks add."""
        chosen = [unit[pick] for unit, pick in zip(self.units, picks, strict=True)]
        return self.seconds + sum(each.seconds for each in chosen), self.nbytes + sum(each.nbytes for each in chosen)

    def step_seconds(self, picks: Picks) -> float:
        """The seconds of a step."""
        return float(self.totals(picks)[0].max(axis=0) @ self.times)

    def peak_bytes(self, picks: Picks) -> float:
        """The most that is held at any place."""
        return float(self.totals(picks)[1].max())


class PolicySolution(NamedTuple):
    """The choices that were found."""

    picks: Picks
    seconds: float  # of a step
    gap: float  # the share of them by which other choices within the budget could be faster at most


def solve(problem: PolicyProblem, budget: float, *, time_limit: float = 30.0) -> PolicySolution | None:
    """Find the fastest choices that hold no more than `budget` bytes; `None` if no choices do.

    After `time_limit` seconds the best that is known counts. Raise `MissingExtraError` without scipy.
    """
    found = _branch_and_bound(problem, budget, time_limit)
    known = [found.picks]
    if not (found.is_proven and found.picks and problem.peak_bytes(found.picks) <= budget):
        known.append(greedy(problem, budget))
    fitting = [picks for picks in known if picks is not None and problem.peak_bytes(picks) <= budget]
    if not fitting:
        return None
    best = min(fitting, key=problem.step_seconds)
    seconds = problem.step_seconds(best)
    return PolicySolution(best, seconds, max(0.0, 1 - found.bound / seconds) if seconds else 0.0)


def greedy(problem: PolicyProblem, budget: float) -> Picks | None:
    """Change one unit at a time: first what frees most bytes per second until all fits, then what is fastest per byte.

    `None` if it comes to an end before all fits.
    """
    picks: Picks = (0,) * len(problem.units)
    seconds, peak = problem.step_seconds(picks), problem.peak_bytes(picks)
    while True:
        busy, held = problem.totals(picks)
        changes = []
        for i, pick in _neighbours(problem, picks):
            old, new = problem.units[i][picks[i]], problem.units[i][pick]
            time = float((busy + (new.seconds - old.seconds)).max(axis=0) @ problem.times)
            changes.append((time, float((held + (new.nbytes - old.nbytes)).max()), i, pick))
        if peak > budget:
            changes = [change for change in changes if change[1] < peak]
            best = max(changes, key=lambda c: (peak - c[1]) / max(c[0] - seconds, _TINY), default=None)
        else:
            changes = [change for change in changes if change[1] <= budget and change[0] < seconds - _TINY]
            best = max(changes, key=lambda c: (seconds - c[0]) / max(c[1] - peak, 1.0), default=None)
        if best is None:
            return picks if peak <= budget else None
        seconds, peak, i, pick = best
        picks = (*picks[:i], pick, *picks[i + 1 :])


_TINY = 1e-12  # seconds


def _neighbours(problem: PolicyProblem, picks: Picks) -> Iterator[tuple[int, int]]:
    """All changes of one unit's pick; of units that are alike and have picked alike, that of the last one."""
    seen = set()
    for i in reversed(range(len(picks))):
        for pick in range(len(problem.units[i])):
            change = (tuple(choice.name for choice in problem.units[i]), picks[i], pick)
            if pick != picks[i] and change not in seen:
                seen.add(change)
                yield i, pick


class _Bounded(NamedTuple):
    picks: Picks | None  # `None` where none fit, or the time was too short
    bound: float  # seconds that no choices beat
    is_proven: bool


def _branch_and_bound(problem: PolicyProblem, budget: float, time_limit: float) -> _Bounded:
    """Run `milp` over one variable for each choice, 0 or 1, and one for each moment whose busiest resource is open."""
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise MissingExtraError("scipy", "plan") from error
    counts, starts, busy, held = problem.flat
    places, busiest = problem.decisive
    moment, resource = np.nonzero(busiest & (busiest.sum(axis=1, keepdims=True) == 1))
    cost = busy[:, resource, moment] @ problem.times[moment]
    base = problem.seconds[resource, moment] @ problem.times[moment]
    moments = np.flatnonzero(busiest.sum(axis=1) > 1)
    column, resource = np.nonzero(busiest[moments])
    # A solver's tolerances are those of numbers around 1.
    scale, unit = max(float(problem.nbytes.max()), 1.0), problem.step_seconds((0,) * len(counts)) or 1.0
    one_of_each = np.repeat(np.eye(len(counts)), counts, axis=1)
    rows = sparse.block_array(
        [
            [sparse.csr_array(one_of_each), sparse.csr_array((len(counts), len(moments)))],
            [sparse.csr_array(held[:, places].T / scale), None],
            [
                sparse.csr_array(-busy[:, resource, moments[column]].T / unit),
                sparse.csr_array(np.eye(len(moments))[column]),
            ],
        ]
    )
    ones, open_ended = np.ones(len(counts)), np.full(len(column), np.inf)
    lower = [ones, np.full(places.sum(), -np.inf), problem.seconds[resource, moments[column]] / unit]
    upper = [ones, (budget - problem.nbytes[places]) / scale, open_ended]
    is_choice = np.arange(rows.shape[1]) < len(held)
    found = optimize.milp(
        np.concatenate([cost / unit, problem.times[moments]]),
        constraints=optimize.LinearConstraint(rows, lb=np.concatenate(lower), ub=np.concatenate(upper)),
        integrality=is_choice,
        bounds=optimize.Bounds(0, np.where(is_choice, 1, np.inf)),
        options={"time_limit": time_limit, "mip_rel_gap": 1e-7},
    )
    parts = [] if found.x is None else np.split(found.x[: len(held)], starts[1:])
    picks = tuple(int(np.argmax(part)) for part in parts) or None
    bound = 0.0 if found.mip_dual_bound is None else max(0.0, found.mip_dual_bound * unit + base)
    return _Bounded(picks, bound, found.status == 0)


def _decisive(base: Array, added: Array, starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """`[rows]`: those of `base` that may be the largest one with `added` `[choices, rows]`; units have `starts`."""
    found = np.ones(len(base), dtype=bool)
    for row in range(len(base)):
        above = np.maximum.reduceat(added[:, row, None] - added, starts).sum(axis=0) + base[row] - base  # at most
        found[row] = np.count_nonzero(found & (above <= 0)) == 1  # none but itself
    return found
