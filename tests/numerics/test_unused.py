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
from fxshard.errors import UnsupportedGraph
from tests.numerics.harness import EAGER, FSDP2, assert_same_tensors, compile_module, full
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


def grads(shard: Callable[..., Any], microbatches: tuple[tuple[int, ...], ...]) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = shard(Branches())
    model.set_reduce_scatter_unused_params(True)
    for i, which in enumerate(microbatches):
        model.set_requires_gradient_sync(i == len(microbatches) - 1)
        model(torch.ones(2, WIDTH) * (1 + dist.get_rank()), which).square().mean().backward()
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this FSDP2 cannot")
@two_ranks
@pytest.mark.parametrize("accumulates", [False, slow(True)])
def test_ranks_that_take_other_branches_reduce_as_fsdp2(accumulates: bool) -> None:
    mine: tuple[tuple[int, ...], ...] = ((dist.get_rank(),),)
    if accumulates:
        mine = ((0, 1), *mine)
    assert FSDP2.fully_shard is not None
    ours, theirs = grads(fxshard.fully_shard, mine), grads(FSDP2.fully_shard, mine)
    assert_same_tensors(ours, theirs, "gradient", rtol=0.0, atol=0.0)


@two_ranks
def test_a_graph_has_to_read_all_parameters_of_the_unit() -> None:
    model: Any = fxshard.fully_shard(Branches())
    model.set_reduce_scatter_unused_params(True)
    compiled, x = compile_module(model, options=EAGER), torch.ones(2, WIDTH)
    compiled(x, (0, 1)).sum().backward()
    with pytest.raises(Exception, match=r"a graph gives second.weight, second.bias no gradient") as refused:
        compiled(x, (0,))
    assert isinstance(refused.value, UnsupportedGraph)
