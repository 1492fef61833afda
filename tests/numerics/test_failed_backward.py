"""A backward that fails while gradients wait to be reduced: nothing of its step may be added to the next one's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

import fxshard
from tests.numerics.harness import full, sharded_as
from tests.pairwise import each_once, slow
from tests.ranks import two_ranks

WIDTH = 4
WAYS = ["compiled", "eager", "one line", "in parts"]


class Deliberate(Exception):
    """What a backward fails with."""


class FailOnce(torch.autograd.Function):
    """The identity; its backward raises while `armed` says so."""

    armed = False

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        if FailOnce.armed:
            raise Deliberate
        return grads[0]


class Middle(nn.Module):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return FailOnce.apply(x)  # type: ignore[no-untyped-call]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), Middle(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def plain() -> Net:
    return Net().double()


def sharded(way: str) -> tuple[nn.Module, Any]:
    model = plain()
    return sharded_as(model, way, parts=(model.first, model.last)), model


def fail(grad: Tensor) -> None:
    raise Deliberate


def backward(run: nn.Module, batch: int, where: str = "") -> None:
    rank = dist.get_rank()
    result = run(torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * batch + rank)))
    if where == "output":
        result.register_hook(fail)
    if where == "loss":
        result = FailOnce.apply(result)  # type: ignore[no-untyped-call]
    FailOnce.armed = where in ("middle", "loss")
    try:
        result.pow(2).sum().backward()
    finally:
        FailOnce.armed = False


def accumulate(run: nn.Module, model: nn.Module, batches: list[int], where: str = "") -> None:
    for batch in batches[:-1]:
        with fxshard.no_sync(model):
            backward(run, batch)
    if where:
        with pytest.raises(Deliberate), fxshard.no_sync(model):
            backward(run, batches[-1], where)
    else:
        backward(run, batches[-1])


def assert_is_mean_of(model: nn.Module, batches: list[int]) -> None:
    reference = plain()
    for batch in batches:
        for rank in range(2):
            seed = torch.Generator().manual_seed(2 * batch + rank)
            (reference(torch.randn(3, WIDTH, dtype=torch.float64, generator=seed)).pow(2).sum() / 2).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-9, atol=1e-12)


@two_ranks
@each_once(way=WAYS, where=["middle", "output", "loss"])
@pytest.mark.parametrize("before", [slow(0), 1])
def test_the_next_forward_refuses_to_go_on_until_the_step_is_given_up(way: str, where: str, before: int) -> None:
    run, model = sharded(way)
    accumulate(run, model, [1, 2])
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.zero_grad()
    accumulate(run, model, [*range(before), 3], where)
    optim.zero_grad()
    if before or where == "middle":
        with (
            fxshard.no_sync(model) if where == "loss" else nullcontext(),
            pytest.raises(fxshard.UnsupportedGraph, match=r"(?s)a backward failed .*reset_iter_state\(\)"),
        ):
            backward(run, 4)
        model.reset_iter_state()
    accumulate(run, model, [5, 6])
    assert_is_mean_of(model, [5, 6])


@two_ranks
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("set_to_none", [True, slow(False)])
def test_zero_grad_of_the_model_drops_what_waits(way: str, set_to_none: bool) -> None:
    """Also between microbatches."""
    run, model = sharded(way)
    accumulate(run, model, [1, 2])
    model.zero_grad(set_to_none)
    accumulate(run, model, [0, 3], "middle")
    model.zero_grad(set_to_none)
    accumulate(run, model, [5, 6])
    assert_is_mean_of(model, [5, 6])
    with fxshard.no_sync(model):
        backward(run, 1)
    model.zero_grad(set_to_none)
    backward(run, 2)
    assert_is_mean_of(model, [2])


@two_ranks
@pytest.mark.parametrize("way", WAYS)
def test_what_only_looks_like_a_failed_backward_is_accepted(way: str) -> None:
    """A forward that is thrown away, one that fails, a failed backward of which nothing waits, gradients of inputs."""
    run, model = sharded(way)
    backward(run, 0)
    model.zero_grad()
    with fxshard.no_sync(model):
        backward(run, 1)
        run(torch.ones(3, WIDTH, dtype=torch.float64))
        with pytest.raises(RuntimeError):
            run(torch.ones(3, WIDTH + 1, dtype=torch.float64))
    backward(run, 2)
    assert_is_mean_of(model, [1, 2])
    with pytest.raises(Deliberate):
        backward(run, 3, "output")
    model.zero_grad()
    x = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        with fxshard.no_sync(model):
            loss: Any = run(x).sum()
            torch.autograd.grad(loss, x)
    model.zero_grad()
    accumulate(run, model, [5, 6])
    assert_is_mean_of(model, [5, 6])


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("way", ["compiled", slow("in parts")])
def test_a_lost_forward_is_warned_of_where_a_compilation_hides_whether_its_backward_failed(way: str) -> None:
    run, model = sharded(way)
    accumulate(run, model, [1, 2])
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    accumulate(run, model, [0, 3], "loss")
    with TestCase().assertLogs("fxshard", "WARNING") as logs:
        run(torch.ones(5, WIDTH, dtype=torch.float64)).sum().backward()  # compiled for the new shape
    assert "model.reset_iter_state()" in "".join(logs.output)
