"""Ranks that save or load with different arguments all get an error, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import fxshard
from fxshard.errors import CheckpointError, ConfigError, RankMismatchError
from fxshard.state import checkpoint, checkpoint_dir, manifest
from fxshard.state.dcp_reader import CheckpointIndex
from fxshard.state.manifest import Reading
from tests.ranks import two_ranks
from tests.state.bodies import build, state_of, train
from tests.state.helpers import require_refusal, shared_folder
from tests.state.states import assert_same


def on_rank_1(value: Any, otherwise: Any) -> Any:
    return value if dist.get_rank() == 1 else otherwise


Call = Callable[[Path, nn.Module, Optimizer], Any]


def without_state(folder: Path, model: nn.Module, optim: Optimizer) -> None:
    if dist.get_rank() == 1:
        optim.state.clear()
    fxshard.save_checkpoint(folder / "a", model, optim)


def with_other_lr(folder: Path, model: nn.Module, optim: Optimizer) -> None:
    optim.param_groups[1]["lr"] = on_rank_1(0.5, 0.25)
    fxshard.save_checkpoint(folder / "a", model, optim)


def with_local_state(folder: Path, model: nn.Module, optim: Optimizer) -> None:
    optim.state[next(model.parameters())]["step"].add_(dist.get_rank())
    fxshard.save_checkpoint(folder / "a", model, optim)


def with_other_groups(folder: Path, model: nn.Module, optim: Optimizer) -> None:
    fxshard.load_checkpoint(folder / "a", model, on_rank_1(torch.optim.AdamW(model.parameters()), optim))


def with_a_tensor_for_rank_1(folder: Path, model: nn.Module, optim: Optimizer) -> None:
    fxshard.save_checkpoint(folder / "a", model, optim, extra={"data": torch.full((2,), dist.get_rank())})


def saving_and_loading(folder: Path, model: nn.Module, optim: Optimizer) -> None:
    on_rank_1(fxshard.load_checkpoint, fxshard.save_checkpoint)(folder / "a", model, optim)


DISAGREEMENTS: dict[str, tuple[Call, str]] = {
    "no optimizer": (
        lambda folder, model, optim: fxshard.save_checkpoint(folder / "a", model, on_rank_1(None, optim)),
        "optimizer: AdamW on rank 0, none on rank 1",
    ),
    "no optimizer to load": (
        lambda folder, model, optim: fxshard.load_checkpoint(folder / "a", model, on_rank_1(None, optim)),
        "optimizer: AdamW on rank 0, none on rank 1",
    ),
    "no state": (without_state, "state of blocks.0.up.weight: ['step'] torch.float32[] whole = 1.0, "),
    "lr": (
        with_other_lr,
        "param_groups[1]['lr']: 0.25 on rank 0, 0.5 on rank 1",
    ),
    "local state": (
        with_local_state,
        "state of blocks.0.norm.weight: ['step'] torch.float32[] whole = 1.0, ",
    ),
    "groups": (with_other_groups, "param_groups[0][0]: 'blocks.0.up.weight' on rank 0, "),
    "path": (
        lambda folder, model, optim: fxshard.save_checkpoint(folder / on_rank_1("b", "a"), model, optim),
        "path: /",
    ),
    "path to load": (
        lambda folder, model, optim: fxshard.load_checkpoint(folder / on_rank_1("b", "a"), model, optim),
        "path: /",
    ),
    "extra": (with_a_tensor_for_rank_1, "extra['data']: torch.int64[2] whole = CRC-32"),
    "no extra": (
        lambda folder, model, optim: fxshard.save_checkpoint(folder / "a", model, optim, extra=on_rank_1(None, {1: 2})),
        "extra[1]: 2 on rank 0, nothing on rank 1; extra: nothing on rank 0, None on rank 1",
    ),
    "empty extra": (
        lambda folder, model, optim: fxshard.save_checkpoint(
            folder / "a", model, optim, extra={"seen": on_rank_1({}, [])}
        ),
        "extra['seen']: an empty list on rank 0, an empty dict on rank 1",
    ),
    "call": (saving_and_loading, "the call: save_checkpoint on rank 0, load_checkpoint on rank 1"),
}


@two_ranks
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_all_get_an_error(name: str) -> None:
    call, message = DISAGREEMENTS[name]
    model, optim = build()
    train(model, optim, range(1))
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim, extra=0)
        expected = state_of(model, optim)
        with pytest.raises(RankMismatchError) as caught:
            call(folder, model, optim)
        assert "_checkpoint: the ranks do not hold the same state. " in str(caught.value)
        assert message in str(caught.value), str(caught.value)
        other, other_optim = build(seed=1)
        assert fxshard.load_checkpoint(folder / "a", other, other_optim) == 0
        assert_same(state_of(other, other_optim), expected)


@two_ranks
def test_an_error_names_what_each_rank_has_found() -> None:
    model, optim = build()
    path: Any = on_rank_1("a", 3)
    other: Any = on_rank_1([], optim)
    with pytest.raises(ConfigError, match=r"^rank 0: path must be the path of .* rank 1: optim must be a torch\.optim"):
        fxshard.save_checkpoint(path, model, other)


@two_ranks
def test_an_error_on_one_rank_is_an_error_on_all() -> None:
    model, optim = build()
    with shared_folder() as folder:
        with pytest.raises(ConfigError, match=r"^rank 1: extra is a builtins.object"):
            fxshard.save_checkpoint(folder / "a", model, optim, extra=on_rank_1(object(), 1))
        with pytest.raises(ConfigError, match=r"^rank 1: optim must be a torch.optim.Optimizer, got int"):
            fxshard.load_checkpoint(folder / "a", model, on_rank_1(3, optim))


STAGES: dict[str, tuple[Any, str]] = {
    "manifest": (checkpoint, "Reading"),
    "comparison": (checkpoint, "verify"),
    "rows": (CheckpointIndex, "read"),
}


@two_ranks
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_loaded(stage: str) -> None:
    """Another job saves, as rank 1 has read some of it."""
    model, optim = build()
    other, other_optim = build(seed=1)
    owner, name = STAGES[stage]
    work = getattr(owner, name)

    def meanwhile(*args: Any) -> Any:
        found = work(*args) if stage == "manifest" else None
        on_rank_1(checkpoint_dir.commit, lambda *_: None)(folder / "b", folder / "a")
        return found or work(*args)

    with shared_folder() as folder, pytest.MonkeyPatch.context() as patch:
        fxshard.save_checkpoint(folder / "a", model, optim)
        fxshard.save_checkpoint(folder / "b", other, other_optim)
        patch.setattr(owner, name, meanwhile)
        message = f"{folder / 'a'} was replaced or removed while it was read; load again"
        require_refusal(folder / "a", *build(seed=2), CheckpointError, message)


def test_a_checkpoint_that_is_gone_when_its_manifest_is_read_was_replaced(tmp_path: Path) -> None:
    """A rank may look between the two renames of a save."""
    with pytest.raises(CheckpointError, match="was replaced or removed while it was read; load again"):
        Reading(tmp_path / "a")


def test_a_manifest_that_may_not_be_read_was_not_replaced(tmp_path: Path) -> None:
    loop = tmp_path / manifest.NAME
    loop.symlink_to(loop)  # an error even for root
    with pytest.raises(OSError, match="symbolic links"):
        Reading(tmp_path)
