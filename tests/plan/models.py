"""A small model with blocks, to be planned: its costs are worked out by hand."""

import torch
from torch import Tensor, nn

WIDTH, ROWS, LAYERS = 256, 64, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight)


class Stack(nn.Module):
    """Blocks between a first and a last product."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.last = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).sum()


def build(batch: int = 1) -> tuple[nn.Module, tuple[Tensor]]:
    """The stack on the meta device, with `batch` times `ROWS` rows."""
    with torch.device("meta"):
        return Stack(), (torch.empty(batch * ROWS, WIDTH),)
