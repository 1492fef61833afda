"""Random models, units, meshes, policies and microbatches train as without shards, with every pass verified."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.attacks.model_grammar import Case, Part, cases
from tests.attacks.training import Sharded, train_all, train_emulated
from tests.ranks import shared_pool
from tests.state import processes

BY_CHANCE = "FXSHARD_MODELS" in os.environ
MODELS = int(os.environ.get("FXSHARD_MODELS", "200"))
"""Models that the slow lane trains in one process."""

EMULATED = ((2,), (2,), (3,), (4,), (2, 2), (2, 2), (2, 1), (1,))
ON_TWO = ((2,), (2,), (2, 1), (1, 2))
ON_FOUR = ((2, 2), (2, 2), (4,))


def drawn(number: int) -> settings:
    """Return settings for so many models, the same ones at each run unless the number was asked for."""
    return settings(
        max_examples=number,
        derandomize=not BY_CHANCE,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )


@drawn(8)
@given(cases(EMULATED))
def test_a_random_model_trains_as_unsharded(case: Case) -> None:
    train_emulated(case)


@pytest.mark.slow
@pytest.mark.timeout(0)
@drawn(MODELS)
@given(cases(EMULATED))
def test_many_random_models_train_as_unsharded(case: Case) -> None:
    train_emulated(case)


@pytest.mark.multi_rank
@drawn(2)
@given(cases(ON_TWO, ignoring=False, splitting=2))
def test_a_random_model_trains_on_two_ranks_as_unsharded(case: Case) -> None:
    shared_pool().run(train_all, cases=[case])


@pytest.mark.slow
@pytest.mark.multi_rank
@pytest.mark.timeout(0)
@drawn(20)
@given(cases(ON_TWO, ignoring=False, splitting=2))
def test_many_random_models_train_on_two_ranks_as_unsharded(case: Case) -> None:
    shared_pool().run(train_all, cases=[case])


@pytest.mark.slow
@pytest.mark.multi_rank
@pytest.mark.timeout(0)
@drawn(1)
@given(st.lists(cases(ON_FOUR, ignoring=False, splitting=2), min_size=10, max_size=10))
def test_random_models_train_on_four_ranks_as_unsharded(some: list[Case]) -> None:
    processes.run(4, train_all, some)


@drawn(50)
@given(cases(EMULATED))
def test_a_case_prints_as_the_code_that_makes_it(case: Case) -> None:
    assert eval(repr(case)) == case


def test_notices_a_gradient_that_is_divided_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees what is wrong with the root's gradients alone."""

    def wrongly(self: Any) -> Any:
        self.model.set_gradient_divide_factor(1.5)
        return self.model

    monkeypatch.setattr(Sharded, "_compiled", wrongly)
    with pytest.raises(AssertionError, match="gradient of offset"):
        train_emulated(Case())


# ---- what random models have found


@pytest.mark.parametrize("unit", ["own", "nested"])
def test_a_part_compiled_alone_trains_beside_a_parameter_that_a_root_without_others_ignores(unit: str) -> None:
    train_emulated(Case(parts=(Part(unit=unit),), ignored=True, compiled="parts"))


def test_a_graph_may_read_ignored_parameters_alone() -> None:
    train_emulated(Case(parts=(Part(skipped=True),), ignored=True))
