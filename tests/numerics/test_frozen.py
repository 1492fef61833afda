"""Graphs in which nothing trains, between parts that do: their inputs need gradients all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from fxshard import UnsupportedGraph
from tests.numerics.harness import full, sharded_as
from tests.pairwise import each_once, slow
from tests.ranks import two_ranks

WIDTH = 4
LOWERINGS = pytest.mark.parametrize("lower", ["eager", slow("inductor")])


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))).double()


def sharded(model: nn.Sequential, lower: str, *, one_by_one: bool) -> nn.Module:
    return sharded_as(model, "in parts" if one_by_one else "compiled", parts=model, lower=lower)


def batch(rank: int, step: int = 0) -> Tensor:
    seed = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=seed)


def same_gradients(ours: Iterable[nn.Parameter], plain: Iterable[nn.Parameter]) -> None:
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(full(mine.grad), theirs.grad, rtol=1e-9, atol=1e-12)


def loss_of(model: nn.Module, step: int, prompt: Tensor | None, rank: int) -> Tensor:
    x = batch(rank, step)
    return model(x if prompt is None else x + prompt).square().mean()


def mean_of(loss: Callable[[int], Tensor]) -> None:
    """Backward of the mean over both ranks' batches, as unsharded training has it."""
    for rank in range(2):
        (loss(rank) / 2).backward()


@two_ranks
@each_once(lower=["eager", "inductor"], one_by_one=[False, True])
@pytest.mark.parametrize("frozen", [[0], slow([1]), slow([2]), [0, 1, 2]], ids=str)
def test_a_soft_prompt_trains_through_frozen_blocks(frozen: list[int], lower: str, one_by_one: bool) -> None:
    model, plain = blocks(), blocks()
    run = sharded(model, lower, one_by_one=one_by_one)
    prompts = [torch.ones(WIDTH, dtype=torch.float64).requires_grad_() for _ in range(2)]
    for each in (model, plain):
        for i in frozen:
            each[i].requires_grad_(False)
    for step in range(2):
        run(batch(dist.get_rank(), step) + prompts[0]).square().mean().backward()
        mean_of(partial(loss_of, plain, step, prompts[1]))
    same_gradients(model.parameters(), plain.parameters())
    prompt = prompts[0].grad
    assert prompt is not None
    dist.all_reduce(prompt)
    torch.testing.assert_close(prompt / 2, prompts[1].grad, rtol=1e-9, atol=1e-12)


@two_ranks
@LOWERINGS
def test_a_generator_trains_through_a_frozen_discriminator_and_the_other_way_round(lower: str) -> None:
    ours, plain = [blocks(2), blocks(2)], [blocks(2), blocks(2)]
    generator, discriminator = (sharded(model, lower, one_by_one=False) for model in ours)
    for step in range(3):
        x = batch(dist.get_rank(), step)
        for model in (*ours, *plain):
            model.zero_grad()
        for models in (ours, plain):
            models[1].requires_grad_(step % 2 == 1)
            models[0].requires_grad_(step % 2 == 0)
        discriminator(generator(x)).square().mean().backward()
        mean_of(partial(loss_of, nn.Sequential(*plain), step, None))
        for mine, theirs in zip(ours, plain, strict=True):
            same_gradients(mine.parameters(), theirs.parameters())


@two_ranks
@pytest.mark.parametrize("one_by_one", [False, True])
def test_gradual_unfreezing_trains_what_is_unfrozen(one_by_one: bool) -> None:
    model, plain = blocks(), blocks()
    run = sharded(model, "eager", one_by_one=one_by_one)
    for each in (model, plain):
        each.requires_grad_(False)
    for step in range(3):
        for each in (model, plain):
            each[2 - step].requires_grad_(True)
            each.zero_grad()
        run(batch(dist.get_rank(), step)).square().mean().backward()
        mean_of(partial(loss_of, plain, step, None))
        same_gradients(model.parameters(), plain.parameters())


@two_ranks
def test_a_frozen_graph_that_accumulates_reduces_nothing_and_passes_gradients_on() -> None:
    model = blocks()
    run = sharded(model.requires_grad_(False), "eager", one_by_one=True)
    x: Any = batch(0).requires_grad_()
    with fxshard.no_sync(model):
        run(x).sum().backward()
    first = x.grad.clone()
    run(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * first)


@two_ranks
def test_refuses_the_backward_of_a_frozen_graph_after_its_parameters_were_changed() -> None:
    model = blocks()
    run = sharded(model.requires_grad_(False), "eager", one_by_one=True)
    loss = run(batch(0).requires_grad_()).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(UnsupportedGraph, match="changed between forward and backward"):
        loss.backward()


@two_ranks
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_forward_without_gradients_may_freeze_parameters_for_itself(one_by_one: bool) -> None:
    """As peft's `disable_adapter` does for the reference of a DPO step, between forward and backward."""
    rank, plain, ours = dist.get_rank(), blocks(), blocks()
    model = sharded(ours, "eager", one_by_one=one_by_one)
    for step in range(2):
        loss = loss_of(model, step, None, rank)
        ours[0].requires_grad_(False)
        with torch.no_grad():
            loss_of(model, step, None, rank)
        ours[0].requires_grad_(True)
        loss.backward()
        mean_of(partial(loss_of, plain, step, None))
        same_gradients(model.parameters(), plain.parameters())
