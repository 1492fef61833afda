"""What the demo concludes from the events of its ranks, and prints where nothing can move."""

from __future__ import annotations

import io
from collections.abc import Generator
from pathlib import Path

import pytest
from rich.console import Console

from fxshard.tools.demo import run
from fxshard.tools.demo.config import DemoConfig
from fxshard.tools.demo.events import Event, Graph, Run, Started, Step, UnitLaunches
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


def scripted(last_loss: float) -> Generator[Event]:
    """A demo of 1 rank and 3 steps that ends with `last_loss`; unsharded, the loss is 3 then."""
    for training, end in ((Run.SHARDED, last_loss), (Run.UNSHARDED, 3.0)):
        yield Started(run=training, num_params=1_000_000, full_bytes=16 << 20)
        for step, loss in enumerate((5.0, 4.0, end)):
            yield Step(run=training, rank=0, step=step, loss=loss, seconds=0.5, state_bytes=8 << 20)
    yield Graph(kind="forward", path="out/forward.txt", collectives={"all_gather": 7})
    yield UnitLaunches(name="blocks.0", num_params=262_144, launches={"forward": {"all_gather": 1}, "backward": {}})
    yield UnitLaunches(name="the rest", num_params=24, launches={})


def demo(monkeypatch: pytest.MonkeyPatch, last_loss: float) -> tuple[int, list[str]]:
    monkeypatch.setattr(run, "events_of_ranks", lambda config: scripted(last_loss))
    config = DemoConfig(ranks=1, device="cpu", out=Path(), steps=3, batch_size=4, seq_len=100)
    file = io.StringIO()
    status = run.run_demo(config, Console(file=file, force_terminal=False, width=100))
    return status, file.getvalue().splitlines()


def test_progress_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    _, lines = demo(monkeypatch, last_loss=3.0)
    assert lines[:3] == [
        "fxshard demo: gpt on 1 rank (cpu), 3 steps, 400 tokens per step, lowered to inductor",
        "sharded: compiling a model of 1.0M parameters",
        "sharded: step 1/3  loss 5.0000  8.0 MiB per rank of 16.0 MiB",
    ]
    assert "sharded: step 2/3  loss 4.0000  800 tokens/s  8.0 MiB per rank of 16.0 MiB" in lines


def test_the_end_tells_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    status, lines = demo(monkeypatch, last_loss=3.0)
    assert status == 0
    assert "forward graph         7 all_gather per call: out/forward.txt" in lines
    assert "│ blocks.0 │    262,144 │ 1 all_gather     │ no collectives   │" in lines
    assert "│ the rest │         24 │ where it is read │ where it is read │" in lines
    assert any("merged, for at most 1.0 MiB more of gathered parameters" in line for line in lines)
    assert any(line.startswith("stored per rank       8.0 MiB") and "50.0% of the full" in line for line in lines)
    assert lines[-1].startswith("OK: the loss fell from 5.000 to 3.000, and sharded training equals unsharded training")


@pytest.mark.parametrize(
    ("last_loss", "verdict"),
    [
        (3.002, "FAILED: sharded and unsharded losses differ by 2.00e-03, more than 1e-03"),
        (float("nan"), "FAILED: sharded and unsharded losses differ by nan, more than 1e-03"),
    ],
    ids=["differs", "nan"],
)
def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch, last_loss: float, verdict: str) -> None:
    status, lines = demo(monkeypatch, last_loss)
    assert status == 1
    assert lines[-1] == verdict
