"""What the demo concludes from the events of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxshard.tools.demo.config import DemoConfig
from fxshard.tools.demo.events import Run, Started, Step
from fxshard.tools.demo.outcome import Outcome


def outcome_of(sharded: list[list[float]], unsharded: list[float]) -> Outcome:
    """Outcome of 2 ranks whose losses at each step are `sharded`; every step takes 1 s on rank 0 and 2 s on rank 1."""
    config = DemoConfig(ranks=2, device="cpu", out=Path(), steps=len(sharded), batch_size=4, seq_len=100)
    outcome = Outcome(config)
    outcome.add(Started(run=Run.SHARDED, num_params=100, full_bytes=1600))
    for step, losses in enumerate(sharded):
        for rank, loss in enumerate(losses):
            seconds = rank + 1.0
            outcome.add(Step(run=Run.SHARDED, rank=rank, step=step, loss=loss, seconds=seconds, state_bytes=800 + rank))
    for step, loss in enumerate(unsharded):
        outcome.add(Step(run=Run.UNSHARDED, rank=0, step=step, loss=loss, seconds=1.0, state_bytes=1600))
    return outcome


def test_a_loss_is_the_mean_over_ranks() -> None:
    outcome = outcome_of([[4.0, 6.0], [3.0, 4.0]], [5.0, 3.5])
    assert outcome.losses(Run.SHARDED) == [5.0, 3.5]
    assert outcome.largest_difference() == 0.0
    assert outcome.problems() == []


def test_a_step_counts_once_all_ranks_have_taken_it() -> None:
    assert outcome_of([[4.0, 6.0], [3.0]], []).losses(Run.SHARDED) == [5.0]


def test_bytes_are_those_of_the_fullest_rank() -> None:
    assert outcome_of([[4.0, 6.0]] * 2, [5.0]).state_bytes == 801


def test_speed_is_that_of_the_slowest_rank_without_the_first_step() -> None:
    assert outcome_of([[5.0, 5.0]] * 3, []).tokens_per_s(Run.SHARDED) == 2 * 4 * 100 / 2.0


@pytest.mark.parametrize("last", [5.0, 6.0, float("nan")])
def test_a_loss_that_does_not_fall_is_a_problem(last: float) -> None:
    (problem,) = outcome_of([[5.0, 5.0], [last, last]], []).problems()
    assert problem.startswith("the loss did not fall: 5.0000 at the first step")


@pytest.mark.parametrize("other", [4.002, float("nan")])
def test_a_difference_is_a_problem(other: float) -> None:
    (problem,) = outcome_of([[5.0, 5.0], [4.0, 4.0]], [5.0, other]).problems()
    assert "sharded and unsharded losses differ by" in problem


def test_without_comparison_there_is_no_difference() -> None:
    assert outcome_of([[5.0, 5.0], [4.0, 4.0]], []).largest_difference() is None
