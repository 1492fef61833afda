"""The models that scripts train."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.attacks.grammar import Setup

WIDTH = 4


def _saves_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self, cut: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.cut = cut
        self.write: Callable[[Tensor], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None:
            self.write(self.linear.weight)
        y: Tensor = self.linear(x).tanh()
        return self._read_once(y) if self.cut else y

    def _read_once(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        with torch.no_grad():
            scale = weight.abs().max()
        y = (x @ weight.t()).tanh()
        if self.cut == "graph break":
            torch._dynamo.graph_break()
        return y @ (weight / scale)


class Net(nn.Module):
    """Blocks, a head, and what no forward reads but a loss may."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(setup.cut) for _ in range(setup.blocks))
        self.head, self.read_by_loss = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        if setup.tied:
            cast(Block, self.blocks[-1]).linear.weight = cast(Block, self.blocks[0]).linear.weight
        self.twice, self.checkpoint, self.fails = setup.twice, setup.checkpoint, False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for _ in range(1 + self.twice):
                x = self.call(block, x)
        if self.fails:
            raise ArithmeticError("the user's own")
        return self.head(x)

    def call(self, block: nn.Module, x: Tensor) -> Any:
        if not self.checkpoint:
            return block(x)
        if self.checkpoint == "all":
            return checkpoint(block, x, use_reentrant=False)
        contexts = partial(create_selective_checkpoint_contexts, _saves_products)
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def write_in_place(w: Tensor, how: str) -> None:
    """One of `grammar.WRITES_IN_FORWARD`."""
    with torch.no_grad():
        if how == "row":
            w[0] = 0.5
        elif how == "data":
            w.data.mul_(0.5)
        elif how == "view":
            w.view(-1).mul_(0.5)
        elif how == "foreach":
            torch._foreach_mul_([w], 0.5)
        elif how == "detach":
            w.detach().mul_(0.5)
        elif how == "out":
            torch.mul(w, 0.5, out=w)
        else:
            w.mul_(0.5)
