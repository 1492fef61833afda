"""A load that cannot be carried through writes nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.errors import ConfigError
from tests.checkpoint.helpers import require_refusal, shared_folder
from tests.ranks import two_ranks


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
