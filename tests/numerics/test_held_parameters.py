"""A parameter read once into a variable, and used on both sides of what cuts a block in two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.harness import (
    Prepare,
    Tools,
    blocks_of,
    check,
    check_against_unsharded,
    check_close,
    check_inductor,
    compile_each_block,
    only_compile,
    only_shard,
    shard_and_compile,
)
from tests.numerics.models import WIDTH
from tests.numerics.scenarios import REGRESSION
from tests.pairwise import slow
from tests.ranks import two_ranks


class Quantized(nn.Module):
    """Scales its weight by what it finds without gradients: fake quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        with torch.no_grad():
            scale = weight.abs().max()
        return x + torch.tanh(nn.functional.linear(x, weight / scale) * 2)


class Broken(Quantized):
    """The same, with a graph break between both uses."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        hidden = torch.tanh(nn.functional.linear(x, weight)) * 2 + x
        torch._dynamo.graph_break()
        return x + torch.tanh(nn.functional.linear(hidden, weight.t()) * 2)


class Sandwiched(Quantized):
    """A unit between both uses, and its parameter as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight, inner = self.weight, self.inner.weight
        hidden = torch.tanh(nn.functional.linear(x, weight)) * 2 + x
        hidden = self.inner(hidden)
        return x + torch.tanh(nn.functional.linear(hidden, weight.t() + inner) * 2)


class Twice(Quantized):
    """Without gradients before, between and after what needs them."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        for _ in range(2):
            with torch.no_grad():
                scale = weight.abs().max() + 1
            x = x + torch.tanh(nn.functional.linear(x, weight / scale) * 2)
        with torch.no_grad():
            scale = weight.abs().sum()
        return x * (1 + scale / scale.detach())


def spectral() -> nn.Module:
    """The form with hooks: a buffer is written in each forward."""
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def inner_too(model: nn.Module, tools: Tools) -> nn.Module:
    """Shard the module in each block by itself."""
    for block in blocks_of(model):
        tools.shard(block.get_submodule("inner"))
    return shard_and_compile(model, tools)


BASE = replace(REGRESSION, model=partial(Stack, Quantized))
BLOCKS = (Quantized, Sandwiched, Twice, spectral, parametrized)


@two_ranks
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("prepare", [shard_and_compile, only_compile, slow(compile_each_block), slow(only_shard)])
def test_trains_as_unsharded_and_fsdp2(block: Callable[[], nn.Module], prepare: Prepare) -> None:
    check(replace(BASE, model=partial(Stack, block), prepare=prepare))


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, slow(compile_each_block)])
def test_trains_across_a_graph_break(prepare: Prepare) -> None:
    """FSDP2 adds the parts of the gradient in another order."""
    check_close(replace(BASE, model=partial(Stack, Broken), prepare=prepare))


@two_ranks
def test_trains_where_a_unit_in_the_block_is_read_before_it_runs() -> None:
    """FSDP2 cannot."""
    check_against_unsharded(replace(BASE, model=partial(Stack, Sandwiched), prepare=inner_too))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("block", [*BLOCKS, Broken])
def test_trains_in_code_of_inductor(block: Callable[[], nn.Module]) -> None:
    check_inductor(replace(BASE, model=partial(Stack, block)), rtol=1e-4, atol=1e-5)
