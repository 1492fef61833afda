"""Small models that tests of several folders use.

`tests/graphs.py` has those whose graphs are printed, `tests/numerics/models.py` those that are trained against FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def matrix(*sizes: int) -> nn.Parameter:
    """Return a random parameter of any number of dimensions."""
    return nn.Parameter(torch.randn(*sizes))


class Doing(nn.Module):
    """Has these parts, and its forward is this function of the module and its inputs."""

    def __init__(self, do: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.do = do
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, *more: Any) -> Any:
        return self.do(self, x, *more)


class FeedForward(nn.Module):
    """Adds to its input what two layers make of it."""

    def __init__(self, width: int, hidden: int, *, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else None
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x if self.norm is None else self.norm(x))))
        return x + y


class Chain(nn.Module):
    """Equal layers in a row, or in the order that a call gives."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor, order: Iterable[int] | None = None) -> Tensor:
        for i in range(len(self.blocks)) if order is None else order:
            x = torch.tanh(self.blocks[i](x))
        return x


class Towers(nn.Module):
    """Two towers of one shape, of which a call uses one, or both: the other with no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, which: str, always: bool = False) -> Tensor:
        if always:
            image = self.image(x if which == "image" else x[:0])
            text = self.text(x if which == "text" else x[:0])
            hidden = image + 0 * text.sum() if which == "image" else text + 0 * image.sum()
        else:
            hidden = self.image(x) if which == "image" else self.text(x)
        return self.head(torch.tanh(hidden))
