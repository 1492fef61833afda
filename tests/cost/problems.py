"""Random problems of the solver."""

from __future__ import annotations

import numpy as np

from fxshard.cost.solver import Choice, PolicyProblem

RESOURCES = 3


def random_problem(seed: int, *, units: int, choices: int) -> PolicyProblem:
    """Units that run one after the other, forward and backward, with choices that trade seconds for bytes."""
    draw = np.random.default_rng(seed)
    places = 2 * units
    found = []
    for i in range(units):
        moments = sorted((i, places - 1 - i))
        of_unit = []
        for number in range(int(draw.integers(2, choices + 1))):
            seconds, nbytes = np.zeros((RESOURCES, places)), np.zeros(places)
            seconds[:, moments] = draw.uniform(0, 1, (RESOURCES, 2))
            nbytes[moments[0] : moments[1] + 1] = draw.integers(0, 100)
            of_unit.append(Choice(name=f"{i}.{number}", seconds=seconds, nbytes=nbytes))
        found.append(of_unit)
    return PolicyProblem(
        units=found,
        seconds=draw.uniform(0, 0.5, (RESOURCES, places)),
        nbytes=draw.integers(0, 50, places).astype(float),
        times=draw.integers(1, 4, places).astype(float),
    )
