"""Models of blocks that are compiled one by one, and what their steps launch and wait for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from fxshard import fully_shard
from fxshard.testing import EmulatedLink
from tests.models import FeedForward

WORDS = {"unshard": "ag", "wait": "w", "reduce": "rs"}
RANGE = re.compile(r"fxshard::(unshard|wait|reduce)\((?:blocks\.)?(.*)\)")
NUM_BLOCKS = 4


class Blocks(nn.Module):
    """Nothing but blocks; those of different widths do not share a graph. `skipped` are left out."""

    skipped: Sequence[int] = ()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(4, 8 + i) for i in range(NUM_BLOCKS))
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if self.breaks:
                torch._dynamo.graph_break()
            if i not in self.skipped:
                x = block(x)
        return x


class Between(Blocks):
    """Blocks between code that is not compiled, which reads parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(super().forward(self.embed(x))))


def sharded(link: EmulatedLink, model_type: Callable[[], Blocks] = Blocks, **settings: Any) -> Blocks:
    torch.manual_seed(0)
    model = model_type()
    for block in model.blocks:
        fully_shard(block, mesh=link.mesh, **settings)
    fully_shard(model, mesh=link.mesh)
    return model


def block_by_block(link: EmulatedLink, model_type: Callable[[], Blocks] = Blocks, **options: Any) -> Blocks:
    model = sharded(link, model_type)
    for block in model.blocks:
        block.compile(backend="fxshard", options={"lower": "eager"} | options)
    return model


def step(model: nn.Module) -> Tensor:
    """The gradients of a step, in one tensor."""
    model.zero_grad()
    torch.manual_seed(1)
    model(torch.randn(3, 4)).square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([cast(DTensor, grad).to_local().flatten() for grad in grads])


def issued(model: nn.Module) -> list[str]:
    """What forward and backward of a step launch and wait for, and when a block computes: `c`."""
    torch.manual_seed(1)
    x = torch.randn(3, 4)
    words = []
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        loss = model(x).square().sum()
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        loss.backward()
    for record in (forward, backward):
        found: list[str] = []
        for event in sorted(record.events() or (), key=lambda event: event.time_range.start):
            match = RANGE.fullmatch(event.name)
            word = "c" if event.name in ("aten::addmm", "aten::mm") else ""
            word = WORDS[match[1]] + match[2] if match else word
            if word and found[-1:] != [word]:
                found.append(word)
        words.append(" ".join(found))
    return words


def warm(model: Blocks) -> Blocks:
    """After a step, in which the prefetch cache has seen what follows what."""
    step(model)
    return model
