"""Small models for tests of the benchmark: `fxshard bench tests.tools.bench.toys:regression`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxshard.tools.bench.task import LossFn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class NeverCompiled(MLP):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def squared(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def regression() -> tuple[nn.Module, Tensor, LossFn]:
    return MLP(), torch.randn(4, 16), squared


def never_compiled() -> tuple[nn.Module, Tensor, LossFn]:
    return NeverCompiled(), torch.randn(4, 16), squared


def no_loss() -> tuple[nn.Module, Tensor]:
    return MLP(), torch.randn(4, 16)


def no_batch() -> nn.Module:
    return MLP()
