"""What the demo prints where nothing can move: whole lines, and the verdict last."""

from __future__ import annotations

import io
from collections.abc import Generator
from pathlib import Path

import pytest
from rich.console import Console

from fxshard.tools.demo import run
from fxshard.tools.demo.config import DemoConfig
from fxshard.tools.demo.events import Event, Graph, Run, Started, Step, UnitLaunches


def scripted(last_loss: float) -> Generator[Event]:
    """A demo of 1 rank and 3 steps that ends with `last_loss`; unsharded, the loss is 3 then."""
    for training, end in ((Run.SHARDED, last_loss), (Run.UNSHARDED, 3.0)):
        yield Started(run=training, num_params=1_000_000, full_bytes=16 << 20)
        for step, loss in enumerate((5.0, 4.0, end)):
            yield Step(run=training, rank=0, step=step, loss=loss, seconds=0.5, state_bytes=8 << 20)
    yield Graph(kind="forward", path="out/forward.txt", collectives={"all_gather": 7})
    yield UnitLaunches(name="blocks.0", num_params=1000, launches={"forward": {"all_gather": 1}, "backward": {}})
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
    assert "│ blocks.0 │      1,000 │ 1 all_gather     │ no collectives   │" in lines
    assert "│ the rest │         24 │ where it is read │ where it is read │" in lines
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
