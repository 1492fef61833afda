"""`save_checkpoint` and `load_checkpoint`: what was saved comes back, to the bit, whoever loads it."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

import fxshard
from fxshard.errors import CheckpointError, ConfigError
from fxshard.state import checkpoint_dir
from tests.numerics.harness import Run, Scenario, adamw, fxshard_system, start, train_step
from tests.numerics.models import MLP, rows
from tests.numerics.scenarios import REGRESSION, SCENARIOS, Lane, names
from tests.pairwise import slow
from tests.ranks import two_ranks
from tests.state import bodies, processes
from tests.state.bodies import build, state_of, train
from tests.state.helpers import shared_folder
from tests.state.states import assert_same

# ---- back on the same ranks


@two_ranks
@pytest.mark.parametrize(("name", "system"), [("mlp", "fxshard"), ("mixed", "fxshard"), ("uneven", "fsdp2")])
def test_what_was_saved_is_loaded_to_the_bit(name: str, system: str) -> None:
    model, optim = build(name, system)
    train(model, optim, range(3))
    expected = state_of(model, optim)
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim, extra={"step": 3})
        assert_same(state_of(model, optim), expected)
        other, other_optim = build(name, system, seed=1)
        assert fxshard.load_checkpoint(folder / "a", other, other_optim) == {"step": 3}
        assert_same(state_of(other, other_optim), expected)
        train(other, other_optim, range(3, 5))  # and over the state that is there now
        fxshard.load_checkpoint(folder / "a", other, other_optim)
        assert_same(state_of(other, other_optim), expected)


@two_ranks
def test_loads_in_place() -> None:
    model, optim = build()
    train(model, optim, range(1))
    weight = next(model.parameters())
    places = [weight.to_local().data_ptr(), optim.state[weight]["exp_avg"].to_local().data_ptr()]  # type: ignore[attr-defined]
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim)
        train(model, optim, range(1, 2))
        fxshard.load_checkpoint(folder / "a", model, optim)
        assert next(model.parameters()) is weight
        now = [weight.to_local().data_ptr(), optim.state[weight]["exp_avg"].to_local().data_ptr()]  # type: ignore[attr-defined]
        assert now == places


@two_ranks
def test_a_save_before_the_first_step_changes_nothing_and_brings_back_an_empty_optimizer() -> None:
    model, optim = build()
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim)
        assert not optim.state
        expected = state_of(model, optim)
        train(model, optim, range(2))
        fxshard.load_checkpoint(folder / "a", model, optim)
        assert_same(state_of(model, optim), expected)


@two_ranks
def test_the_model_alone_can_be_saved_and_loaded() -> None:
    model, optim = build()
    train(model, optim, range(1))
    expected = state_of(model)
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "alone", model)
        fxshard.save_checkpoint(folder / "both", model, optim)
        for name in ("alone", "both"):
            other, _ = build(seed=1)
            assert fxshard.load_checkpoint(folder / name, other) is None
            assert_same(state_of(other), expected)


def fresh(scenario: Scenario, lower: str, seed: int) -> Run:
    """A run whose weights are those of `seed`."""
    torch._dynamo.reset()
    run = start(scenario, fxshard_system(lower=lower))
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(1 + seed)
    return run


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize(
    "name", [name if name in ("one line", "SGD with momentum") else slow(name) for name in names(Lane.RESUMED)]
)
def test_a_run_that_was_broken_off_goes_on_as_if_it_had_not_been(name: str) -> None:
    scenario = SCENARIOS[name]
    unbroken, first = fresh(scenario, "eager", 0), fresh(scenario, "eager", 0)
    for step in range(6):
        train_step(unbroken, step)
    with shared_folder() as folder:
        for step in range(3):
            train_step(first, step)
        fxshard.save_checkpoint(folder / "a", first.model, first.optim)
        second = fresh(scenario, "eager", 1)
        fxshard.load_checkpoint(folder / "a", second.model, second.optim)
        for step in range(3, 6):
            train_step(second, step)
    assert first.losses + second.losses == unbroken.losses
    assert_same(state_of(second.model, second.optim), state_of(unbroken.model, unbroken.optim))


@pytest.mark.slow
@two_ranks
def test_a_model_of_the_one_line_form_can_be_saved_before_its_first_call() -> None:
    run = fresh(SCENARIOS["one line"], "eager", 0)
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", run.model, run.optim)
        train_step(run, 0)
        other = fresh(REGRESSION, "eager", 1)
        fxshard.load_checkpoint(folder / "a", other.model, other.optim)
        train_step(other, 0)
    assert_same(state_of(other.model, other.optim), state_of(run.model, run.optim))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("resident", [slow(False), True])
def test_compiled_code_goes_on_with_what_is_loaded_under_it(resident: bool) -> None:
    run = fresh(REGRESSION, "inductor", 0)
    if resident:
        cast(fxshard.ShardedModule, run.model).set_reshard_after_backward(False)
    with shared_folder() as folder:
        train_step(run, 0)
        fxshard.save_checkpoint(folder / "a", run.model, run.optim)
        train_step(run, 1)
        expected = run.losses[-1]
        fxshard.load_checkpoint(folder / "a", run.model, run.optim)
        train_step(run, 1)
        assert torch.equal(run.losses[-1], expected)


@two_ranks
def test_a_compiled_model_and_one_that_is_not_read_each_other() -> None:
    run = fresh(REGRESSION, "eager", 0)
    train_step(run, 0)
    plain = start(Scenario(model=MLP, batch=rows(), optimizer=adamw), fxshard_system())
    plain.model = plain.model._orig_mod  # type: ignore[assignment]
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", run.model, run.optim)
        fxshard.load_checkpoint(folder / "a", plain.model, plain.optim)
        assert_same(state_of(plain.model, plain.optim), state_of(run.model, run.optim))
        fxshard.save_checkpoint(folder / "b", plain.model, plain.optim)
        fxshard.load_checkpoint(folder / "b", run.model, run.optim)


# ---- on other ranks


@pytest.mark.commands
@pytest.mark.multi_rank
def test_any_number_of_ranks_loads_what_any_number_has_saved(tmp_path: Path) -> None:
    for saving in (1, 2, 4):
        path = str(tmp_path / f"from{saving}")
        expected, *_ = processes.run(saving, bodies.train_and_save, path, "mixed", "fxshard", 2)
        expected["extra"] = {"step": 2}
        for loading in (1, 2, 4):
            for found in processes.run(loading, bodies.load, path, "mixed", "fxshard"):
                assert_same(found, expected)


@pytest.mark.multi_rank
@pytest.mark.parametrize(("saved_by", "loaded_by"), [slow("fxshard", "fsdp2"), ("fsdp2", "fxshard")])
def test_fsdp2_loads_what_fxshard_has_saved_and_the_other_way_round(
    saved_by: str, loaded_by: str, tmp_path: Path
) -> None:
    expected, *_ = processes.run(2, bodies.train_and_save, str(tmp_path / "a"), "uneven", saved_by, 2)
    for found in processes.run(4, bodies.load, str(tmp_path / "a"), "uneven", loaded_by):
        assert_same({**expected, "extra": {"step": 2}}, found)


def test_values_that_are_not_numbers_come_back(tmp_path: Path) -> None:
    model, optim = build("tied", "unsharded")
    with torch.no_grad():
        for p in model.parameters():
            p.view(-1)[0] = torch.nan
    fxshard.save_checkpoint(tmp_path / "a", model, optim)
    other, other_optim = build("tied", "unsharded", seed=1)
    fxshard.load_checkpoint(tmp_path / "a", other, other_optim)
    for one, two in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.view(torch.int32), two.view(torch.int32))


@pytest.mark.multi_rank
def test_one_process_without_a_group_loads_and_saves_the_unsharded_model(tmp_path: Path) -> None:
    expected, *_ = processes.run(2, bodies.train_and_save, str(tmp_path / "a"), "tied", "fxshard", 0)
    model, optim = build("tied", "unsharded", seed=1)
    fxshard.load_checkpoint(tmp_path / "a", model, optim)
    assert_same(state_of(model, optim), expected)
    fxshard.save_checkpoint(tmp_path / "a", model, optim, extra={"step": 0})
    for found in processes.run(2, bodies.load, str(tmp_path / "a"), "tied", "fxshard"):
        assert_same(found, {**expected, "extra": {"step": 0}})


@pytest.mark.multi_rank
def test_training_goes_on_with_other_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    unbroken, *_ = processes.run(2, bodies.save_and_train_on, path, 5, 10, torch.float64)
    for loading in (1, 4):
        losses, *_ = processes.run(loading, bodies.load_and_train, path, "mlp", "fxshard", range(5, 10), torch.float64)
        torch.testing.assert_close(losses, unbroken, rtol=1e-6, atol=0.0)


# ---- the folder


def test_saves_replace_each_other_and_leave_nothing_behind(tmp_path: Path) -> None:
    model, optim = build("mlp", "unsharded")
    for step in range(3):
        train(model, optim, range(step, step + 1))
        fxshard.save_checkpoint(tmp_path / "a", model, optim, extra=step)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert fxshard.load_checkpoint(tmp_path / "a", *build("mlp", "unsharded", seed=1)) == 2


def test_files_have_the_permissions_that_others_have(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    fxshard.save_checkpoint(tmp_path / "new" / "a", MLP(), extra=1)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "new" / "a").iterdir()}
    assert modes == {stat.S_IMODE((tmp_path / "file").stat().st_mode)}
    assert (tmp_path / "new" / "a").stat().st_mode == (tmp_path / "folder").stat().st_mode


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for extra in (1, 2):
        fxshard.save_checkpoint(tmp_path / "link", MLP(), extra=extra)
    assert (tmp_path / "link").is_symlink()
    assert fxshard.load_checkpoint(tmp_path / "real", MLP()) == 2


def test_an_extra_that_would_not_load_replaces_nothing(tmp_path: Path) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP(), extra={np.int64(3): 1})
    for wrong, why in (({object(): 1}, "the key .* is a builtins.object"), (2**3000, "extra could not be read back")):
        with pytest.raises(ConfigError, match=why):
            fxshard.save_checkpoint(tmp_path / "a", MLP(), extra=wrong)
    assert fxshard.load_checkpoint(tmp_path / "a", MLP()) == {3: 1}


def test_the_former_checkpoint_is_found_when_a_save_was_ended_between_its_renames(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for extra in (1, 2):
        fxshard.save_checkpoint(tmp_path / str(extra), MLP(), extra=extra)
    (tmp_path / "1").rename(tmp_path / "a.fxshard-former")
    (tmp_path / "2").rename(tmp_path / "a.fxshard-saving-0")
    with caplog.at_level(logging.WARNING):
        assert fxshard.load_checkpoint(tmp_path / "a", MLP()) == 1
    assert "left by a save that did not end" in caplog.text
    fxshard.save_checkpoint(tmp_path / "a", MLP(), extra=3)
    assert os.listdir(tmp_path) == ["a"]
    assert fxshard.load_checkpoint(tmp_path / "a", MLP()) == 3


def test_a_rename_that_fails_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP(), extra=1)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".fxshard-saving" in self.name and self.is_dir():
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(CheckpointError, match=r"could not be replaced .*: load_checkpoint finds the one that was"):
            fxshard.save_checkpoint(tmp_path / "a", MLP(), extra=2)
        with pytest.raises(CheckpointError, match=r"could not be replaced .*: there was none before"):
            fxshard.save_checkpoint(tmp_path / "b", MLP(), extra=2)
    assert os.listdir(tmp_path) == ["a"]
    assert fxshard.load_checkpoint(tmp_path / "a", MLP()) == 1


def test_a_sync_that_fails_after_the_rename_says_that_the_new_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(folder: Path) -> None:
        if (folder / "a").exists():
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_dir, "sync_folder", failing)
        with pytest.raises(CheckpointError, match=r"could not be replaced .*: it is the new checkpoint"):
            fxshard.save_checkpoint(tmp_path / "a", MLP(), extra=2)
    assert fxshard.load_checkpoint(tmp_path / "a", MLP()) == 2


def test_a_former_checkpoint_that_cannot_be_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP(), extra=1)

    def failing(folder: Path) -> None:
        (folder / ".nfs0000a1").touch()
        raise OSError(39, "Directory not empty", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", failing)
        fxshard.save_checkpoint(tmp_path / "a", MLP(), extra=2)
    assert "a.fxshard-former, which it replaces, could not be removed" in caplog.text
    assert fxshard.load_checkpoint(tmp_path / "a", MLP()) == 2
    fxshard.save_checkpoint(tmp_path / "a", MLP(), extra=3)
    assert os.listdir(tmp_path) == ["a"]
