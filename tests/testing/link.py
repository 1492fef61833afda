"""What tests of the emulated link share, on the CPU and on a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

W = 4
"""Ranks."""
OPS: Any = torch.ops._c10d_functional
TIMED: dict[str, Any] = {"gigabytes_per_s": 10.0, "latency_us": 20.0}
TIMED_CUDA: dict[str, Any] = {"gigabytes_per_s": 50.0, "latency_us": 20.0}


def group_name() -> Any:
    """Of the default group."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def ramp(*shape: int) -> Tensor:
    """1, 2, 3, ..."""
    return torch.arange(1.0, math.prod(shape) + 1).view(shape)


def small_numbers(numel: int, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
    """Small whole numbers, which every dtype holds, four times as large too."""
    return (torch.arange(numel) % 13).to(dtype).to(device)
