"""A load that cannot be carried through writes nothing."""

from __future__ import annotations

import copy
import functools
import os
import signal
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import CheckpointError, ConfigError
from tests.ranks import two_ranks
from tests.state.helpers import require_refusal, shared_folder
from tests.state.processes import start


class Refuses(nn.Linear):
    """Takes no extra state but its own."""

    def __init__(self, width: int = 2) -> None:
        super().__init__(width, width)
        self.kept = 0

    def get_extra_state(self) -> int:
        return self.kept

    def set_extra_state(self, state: int) -> None:
        self.kept = state
        if state == 3 and (not dist.is_initialized() or dist.get_rank()):
            raise ValueError("no")


@two_ranks
def test_an_extra_state_that_a_module_refuses_changes_nothing() -> None:
    model, other = (nn.Sequential(Refuses(), Refuses()) for _ in range(2))
    fxshard.fully_shard(model)
    fxshard.fully_shard(other)
    for kept, module in enumerate(model, 2):
        cast(Refuses, module).kept = kept
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim)
        message = "rank 1: 1._extra_state was not taken by its module (ValueError: no), and nothing was loaded"
        require_refusal(folder / "a", other, torch.optim.AdamW(other.parameters()), ConfigError, message)
    assert [cast(Refuses, module).kept for module in other] == [0, 0]


def test_a_buffer_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(1).expand(4))
    fxshard.save_checkpoint(tmp_path / "a", model)
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.weight)
    require_refusal(tmp_path / "a", other, None, ConfigError, "mask cannot be loaded into, for elements share memory")


def test_a_buffer_that_was_made_in_inference_mode_is_refused(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(4))
    with torch.inference_mode():
        other.register_buffer("mask", torch.ones(4))
    fxshard.save_checkpoint(tmp_path / "a", model)
    require_refusal(tmp_path / "a", other, None, ConfigError, "mask cannot be loaded into, for", "in inference mode")
    with torch.inference_mode():
        fxshard.load_checkpoint(tmp_path / "a", other)
        assert other.get_buffer("mask").tolist() == [0.0] * 4


class Kept(nn.Linear):
    """Has an extra state that is a number."""

    kept = 0

    def get_extra_state(self) -> int:
        return self.kept

    def set_extra_state(self, state: int) -> None:
        self.kept = state


def lose_a_rank_in_the_commit(folder: str) -> tuple[int, str, bool]:
    model, other = fxshard.fully_shard(Kept(3, 5)), fxshard.fully_shard(Kept(3, 5))
    model.kept = 7
    fxshard.save_checkpoint(folder, model)
    if dist.get_rank() == 1:
        die = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        other.register_load_state_dict_pre_hook(lambda *_: die())  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError) as caught:
        fxshard.load_checkpoint(folder, other)
    rows = (cast(DTensor, each.weight).to_local() for each in (model, other))
    return other.kept, str(caught.value), torch.equal(*rows)


def test_a_rank_that_is_lost_while_the_model_is_written_leaves_its_extra_state(tmp_path: Path) -> None:
    ends = start(2, lose_a_rank_in_the_commit, str(tmp_path / "a"))
    assert ends[1].killed
    kept, message, is_new = ends[0].result
    assert "the ranks have lost each other" in message
    assert (kept, is_new) == (7, True)


class Renames(nn.Module):
    """Has another name for its weight in its state_dict; knows it again or not."""

    def __init__(self, *, both_ways: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda _, state, *__: state.update(old=state.pop("linear.weight"))
        )
        if both_ways:
            self.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                lambda _, state, *__: state.update({"linear.weight": state.pop("old")})
            )


def test_a_tensor_that_a_hook_renames_is_loaded_or_missed(tmp_path: Path) -> None:
    model, other, third = (Renames(both_ways=each) for each in (True, True, False))
    fxshard.save_checkpoint(tmp_path / "a", model)
    fxshard.load_checkpoint(tmp_path / "a", other)
    assert torch.equal(other.linear.weight, model.linear.weight)
    with pytest.raises(CheckpointError, match="load_state_dict of the model has no place for old, though"):
        fxshard.load_checkpoint(tmp_path / "a", third)
