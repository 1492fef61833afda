"""Whatever kills a save, at whatever moment: a checkpoint is there, whole, and the next save finds its way."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fxshard
from tests.state import bodies, processes
from tests.state.bodies import build, state_of
from tests.state.states import assert_same

NUM_MOMENTS = 20

pytestmark = [pytest.mark.multi_rank, pytest.mark.commands]


@dataclass(frozen=True, kw_only=True)
class Saves:
    """A checkpoint of step 1, what steps 1 and 2 are, and the file events of each rank that saves step 2 over it."""

    former: Path
    states: dict[int, dict[str, Any]]
    events: list[list[str]]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """Save both steps undisturbed."""
    folder = tmp_path_factory.mktemp("saves")
    states = {1: processes.run(2, bodies.train_and_save, str(folder / "former"), "mlp", "fxshard", 1)[0]}
    shutil.copytree(folder / "former", folder / "a")
    events = processes.run(2, bodies.save_over, str(folder / "a"), 0, None)
    loaded = build("mlp", "unsharded", seed=1)
    assert fxshard.load_checkpoint(folder / "a", *loaded) == {"step": 2}
    return Saves(former=folder / "former", states={**states, 2: state_of(*loaded)}, events=events)


def require_one_of_both(path: Path, saves: Saves) -> int:
    """The step that is found; it is whole, and the next save leaves nothing else."""
    model, optim = build("mlp", "unsharded", seed=1)
    step: int = fxshard.load_checkpoint(path, model, optim)["step"]
    assert_same(state_of(model, optim), saves.states[step])
    fxshard.save_checkpoint(path, model, optim, extra={"step": 3})
    assert os.listdir(path.parent) == [path.name]
    assert fxshard.load_checkpoint(path, *build("mlp", "unsharded", seed=1)) == {"step": 3}
    return step


def kill_at(rank: int, event: int, folder: Path, saves: Saves) -> int:
    """Kill `rank` before a file event of its save; what is found then."""
    shutil.copytree(saves.former, folder / "a")
    ends = processes.start(2, bodies.save_over, str(folder / "a"), rank, event)
    assert ends[rank].killed
    survivor = ends[1 - rank]
    assert not survivor.killed
    if survivor.error is not None:  # it may have been done with all that it had to do
        assert "CheckpointError" in survivor.error
        assert "have lost each other" in survivor.error
    return require_one_of_both(folder / "a", saves)


def moments(saves: Saves) -> list[tuple[int, int]]:
    return [(rank, event) for rank, names in enumerate(saves.events) for event in range(len(names))]


def test_a_rank_that_is_killed_leaves_a_checkpoint(saves: Saves, tmp_path: Path) -> None:
    some = random.Random(0).sample(moments(saves), NUM_MOMENTS)
    renames = [event for event, name in enumerate(saves.events[0]) if name == "os.rename"]
    before, between, after = renames[-2], renames[-1], renames[-1] + 1
    found = {}
    for rank, event in {*some, (0, before), (0, between), (0, after)}:
        (folder := tmp_path / f"{rank}-{event}").mkdir()
        found[rank, event] = kill_at(rank, event, folder, saves)
    assert [found[0, event] for event in (before, between, after)] == [1, 1, 2]


@pytest.mark.slow
def test_a_rank_that_is_killed_at_any_file_event_leaves_a_checkpoint(saves: Saves, tmp_path: Path) -> None:
    found = set()
    for rank, event in moments(saves):
        (folder := tmp_path / f"{rank}-{event}").mkdir()
        found.add(kill_at(rank, event, folder, saves))
    assert found == {1, 2}


@pytest.mark.slow
def test_a_rank_that_is_killed_at_a_random_time_leaves_a_checkpoint(saves: Saves, tmp_path: Path) -> None:
    chosen = random.Random(1)
    for moment in range(NUM_MOMENTS):
        (folder := tmp_path / str(moment)).mkdir()
        shutil.copytree(saves.former, folder / "a")
        arguments = (str(folder / "a"), chosen.randrange(2), chosen.random())
        ends = processes.start(2, bodies.save_over_and_die_after, *arguments)
        assert sum(end.killed for end in ends) == 1
        require_one_of_both(folder / "a", saves)


def test_a_first_save_that_is_killed_is_as_if_it_had_not_been(saves: Saves, tmp_path: Path) -> None:
    assert processes.start(2, bodies.save_over, str(tmp_path / "a"), 1, 1)[1].killed
    model, optim = build("mlp", "unsharded")
    with pytest.raises(fxshard.CheckpointError, match="there is no checkpoint at"):
        fxshard.load_checkpoint(tmp_path / "a", model, optim)
    fxshard.save_checkpoint(tmp_path / "a", model, optim)
    assert os.listdir(tmp_path) == ["a"]
