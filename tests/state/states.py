"""Models with uneven rows, their optimizers, and what the state of an unsharded one looks like."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fxshard

WIDTH = 23  # divisible by no world size of the tests

MakeOptimizer = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """Uneven rows, a parameter with fewer rows than ranks, a scalar, a buffer, a frozen and a tied parameter."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(width, 8)
        self.blocks: Any = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for _ in range(2)
        )
        self.norm: Any = nn.BatchNorm1d(8)
        self.one_row = nn.Parameter(torch.randn(1, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.head = nn.Linear(8, width, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.one_row
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)) * self.scale


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def sharded(model: Net) -> Net:
    for block in model.blocks:
        fxshard.fully_shard(block)
    return fxshard.fully_shard(model)


def take_steps(model: nn.Module, optim: Optimizer, steps: int = 2, first: int = 0) -> None:
    """Train, every rank on a batch of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, first + steps):
        optim.zero_grad()
        _loss(model, step, rank).backward()
        optim.step()


def take_steps_of_all(model: nn.Module, optim: Optimizer, steps: int, first: int) -> None:
    """Train on the batches that the ranks have in `take_steps`, all of them on this rank."""
    for step in range(first, first + steps):
        optim.zero_grad()
        for rank in range(dist.get_world_size()):
            (_loss(model, step, rank) / dist.get_world_size()).backward()
        optim.step()


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens = torch.randint(WIDTH, (6,), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1))


class Keeps(nn.Linear):
    def __init__(self, kept: Any = 0) -> None:
        super().__init__(2, 2)
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Refuses(Keeps):
    """Takes 3 as its extra state on rank 0 alone."""

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        if state == 3 and dist.get_rank():
            raise ValueError("no")


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return matrices in one group, with weight decay, and the rest in another, in another order than the model's."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": others, "weight_decay": 0.0}, {"params": matrices, "lr": 0.02, "name": "matrices"}]


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=0.01, **options)


def trained(make: MakeOptimizer = adamw) -> tuple[Net, Optimizer]:
    """Return a model that was never sharded, and its optimizer, after two steps on one batch."""
    model = net()
    optim = make(model)
    for step in range(2):
        tokens = torch.randint(WIDTH, (6,), generator=torch.Generator().manual_seed(step))
        optim.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        optim.step()
    return model, optim


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Hold two trees to the same structure and the same bits, and `found` to plain tensors of their own."""
    assert type(found) is type(expected), f"{path}: {type(found)} and {type(expected)}"
    if isinstance(expected, dict):
        assert list(found) == list(expected), f"{path}: {list(found)} and {list(expected)}"
        for key in expected:
            assert_same(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{path}.{i}")
    elif isinstance(expected, Tensor):
        assert not isinstance(found, DTensor)
        assert (found.dtype, found.shape, found.device) == (expected.dtype, expected.shape, expected.device), path
        assert torch.equal(found, expected), path
        assert found.is_contiguous() or not expected.is_contiguous()
    else:
        assert found == expected, path


def snapshot(model: nn.Module, optim: Optimizer | None = None) -> Any:
    """Return a copy of all values of this rank, to see that nothing was written."""

    def local(value: Any) -> Any:
        return value.to_local().clone() if isinstance(value, DTensor) else copy.deepcopy(value)

    state = {name: local(value.detach()) for name, value in model.state_dict().items()}
    kept = [] if optim is None else [{k: local(v) for k, v in each.items()} for each in optim.state.values()]
    groups = [] if optim is None else [{k: v for k, v in g.items() if k != "params"} for g in optim.param_groups]
    return state, kept, copy.deepcopy(groups)
