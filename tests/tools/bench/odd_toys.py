"""Models that go wrong on some of the ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fxshard.tools.bench.task import LossFn
from tests.tools.bench.toys import MLP, squared

PIDS = "FXSHARD_TEST_PIDS"
"""Environment variable that names a folder for `endless` and `counted`."""


class Lame(MLP):
    """Under FSDP2 rank 1 fails, and the others notice nothing."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self, FSDPModule):
            if dist.get_rank() == 1:
                raise ValueError("rank 1 is lame")
            time.sleep(3600)
        return super().forward(x)


class Endless(MLP):
    """Never comes to an end, and writes down who waits."""

    def forward(self, x: Tensor) -> Tensor:
        (Path(os.environ[PIDS]) / f"rank{dist.get_rank()}").write_text(f"{os.getppid()} {os.getpid()}")
        time.sleep(3600)
        return super().forward(x)


class Counted(MLP):
    """Writes a line at each forward."""

    def forward(self, x: Tensor) -> Tensor:
        with (Path(os.environ[PIDS]) / str(os.getpid())).open("a") as file:
            file.write("forward\n")
        return super().forward(x)


def lame() -> tuple[nn.Module, Tensor, LossFn]:
    return Lame(), torch.randn(4, 16), squared


def endless() -> tuple[nn.Module, Tensor, LossFn]:
    return Endless(), torch.randn(4, 16), squared


def counted() -> tuple[nn.Module, Tensor, LossFn]:
    return Counted(), torch.randn(4, 16), squared
