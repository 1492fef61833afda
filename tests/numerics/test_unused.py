"""Ranks that use other parameters of a unit: `set_reduce_scatter_unused_params`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import fxshard
from fxshard.errors import RankMismatchError, UnsupportedGraph
from tests.numerics.harness import EAGER, FSDP2, assert_same_tensors, blocks_of, compile_module, full
from tests.numerics.models import WIDTH
from tests.pairwise import slow
from tests.ranks import two_ranks


class Branches(nn.Module):
    """Two layers of one shape in one unit: each rank takes one of them, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, which: tuple[int, ...]) -> Tensor:
        out = x
        for i in which:
            out = (self.first, self.second)[i](out)
        return out


class PartlyFrozen(Branches):
    """Branches with a vector that both use, and that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor, which: tuple[int, ...]) -> Tensor:
        return super().forward(x, which) * self.scale


class Unscaled(PartlyFrozen):
    """Does not read its vector."""

    def forward(self, x: Tensor, which: tuple[int, ...]) -> Tensor:
        return Branches.forward(self, x, which)


class Blocks(nn.Module):
    """Units of branches, one after the other, between two layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Branches() for _ in range(3))

    def forward(self, x: Tensor, which: tuple[int, ...]) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x, which))
        return self.leave(x)


Microbatches = tuple[tuple[int, ...], ...]
"""Of a step: the branches that each takes."""


def grads(
    shard: Callable[..., Any],
    microbatches: Microbatches,
    *,
    model: type[nn.Module] = Branches,
    options: dict[str, Any] | None = None,
    **shard_kwargs: Any,
) -> dict[str, Tensor | None]:
    """Train one step; what is compiled is compiled with `options`."""
    torch.manual_seed(0)
    sharded: Any = model()
    for block in blocks_of(sharded):
        shard(block, **shard_kwargs)
    sharded = shard(sharded, **shard_kwargs)
    sharded.set_reduce_scatter_unused_params(True)
    called = sharded if options is None else compile_module(sharded, options=options)
    for i, which in enumerate(microbatches):
        sharded.set_requires_gradient_sync(i == len(microbatches) - 1)
        called(torch.ones(2, WIDTH) * (1 + dist.get_rank()), which).square().mean().backward()
    return {name: None if p.grad is None else full(p.grad) for name, p in sharded.named_parameters()}


needs_fsdp2 = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this FSDP2 cannot"
)
"""From torch 2.13 on."""


@needs_fsdp2
@two_ranks
@pytest.mark.parametrize("accumulates", [False, slow(True)])
def test_ranks_that_take_other_branches_reduce_as_fsdp2(accumulates: bool) -> None:
    mine: Microbatches = ((dist.get_rank(),),)
    if accumulates:
        mine = ((0, 1), *mine)
    assert FSDP2.fully_shard is not None
    ours, theirs = grads(fxshard.fully_shard, mine), grads(FSDP2.fully_shard, mine)
    assert_same_tensors(ours, theirs, "gradient", rtol=0.0, atol=0.0)


TAKEN: dict[str, tuple[Microbatches, Microbatches]] = {
    "another branch": (((0,),), ((1,),)),
    "the same branch": (((1,),), ((1,),)),
    "both or one": (((0, 1),), ((1,),)),
    "microbatches": (((0, 1), (0,), (1,)), ((1,), (1,), (0,))),
}
"""By each rank."""


@needs_fsdp2
@two_ranks
@pytest.mark.parametrize("keeps", [False, slow(True)])
@pytest.mark.parametrize("model", [Branches, slow(PartlyFrozen), slow(Blocks)])
@pytest.mark.parametrize("taken", TAKEN)
def test_graphs_of_other_branches_reduce_as_fsdp2(taken: str, model: type[nn.Module], keeps: bool) -> None:
    assert FSDP2.fully_shard is not None
    mine = TAKEN[taken][dist.get_rank()]
    kwargs: dict[str, Any] = {"model": model, "reshard_after_forward": not keeps}
    theirs = grads(FSDP2.fully_shard, mine, **kwargs)
    ours = grads(fxshard.fully_shard, mine, options=EAGER, **kwargs)
    assert_same_tensors(ours, theirs, "gradient", rtol=0.0, atol=0.0)


@pytest.mark.slow
@needs_fsdp2
@two_ranks
@pytest.mark.parametrize("model", [Branches, Blocks])
def test_compiled_code_of_other_branches_reduces_as_fsdp2(model: type[nn.Module]) -> None:
    assert FSDP2.fully_shard is not None
    mine: Microbatches = ((0, 1), (dist.get_rank(),))
    kwargs: dict[str, Any] = {"model": model, "reshard_after_forward": True}
    theirs, ours = grads(FSDP2.fully_shard, mine, **kwargs), grads(fxshard.fully_shard, mine, options={}, **kwargs)
    assert_same_tensors(ours, theirs, "gradient", rtol=1e-5, atol=1e-7)


@two_ranks
def test_a_graph_has_to_read_something_of_each_shard() -> None:
    model: Any = fxshard.fully_shard(Unscaled())
    model.set_reduce_scatter_unused_params(True)
    compiled, x = compile_module(model, options=EAGER), torch.ones(2, WIDTH)
    with pytest.raises(
        Exception, match=r"a graph reads none of scale, which differ in dtype or requires_grad"
    ) as refused:
        compiled(x, (0,))
    assert isinstance(refused.value, UnsupportedGraph)


@two_ranks
@pytest.mark.parametrize("lower", ["eager", slow("inductor")])
def test_ranks_that_take_other_branches_without_it_are_refused(lower: str) -> None:
    model = compile_module(fxshard.fully_shard(Branches()), options={"lower": lower})
    with pytest.raises(RankMismatchError, match=r"reduce_scatter .* of (first|second).weight, (first|second).bias"):
        model(torch.ones(2, WIDTH), (dist.get_rank(),)).sum().backward()
