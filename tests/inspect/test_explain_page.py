"""The outputs in `docs/explain.md` are those of the library."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import fxshard
from tests.graphs import TwoLayers
from tests.pages import assert_filled, code_block


def explained(model: TwoLayers) -> fxshard.Explanation:
    explanation = fxshard.explain(model, torch.ones(2, 4), world_size=4, options={"lower": "eager"})
    return explanation


def test_the_page_shows_what_the_library_prints(capsys: pytest.CaptureFixture[str]) -> None:
    explanation = explained(TwoLayers())
    (frame,) = explanation.frames
    for schedule in frame.schedules("forward"):
        print(schedule)
    print(f"no schedule can beat {frame.lower_bound('forward') * 1e6:.0f} us")
    schedules = capsys.readouterr().out
    explanation.print("hoist_prefetch", stage="forward")
    why = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")][:3]
    lines = inspect.getsource(explained).splitlines()
    blocks: dict[str, Any] = {
        "call": code_block("\n".join(["import fxshard", "", *(line.strip() for line in lines[1:-1])]), "python"),
        "summary": code_block(repr(explanation)),
        "schedules": code_block(schedules),
        "why": code_block("\n".join(why)),
        "stats": code_block(str(explanation.stats["forward"]["insert_collectives"])),
    }
    assert_filled("docs/explain.md", blocks)
