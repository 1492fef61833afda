"""`torch.func` around a sharded model, of its input: parameters are gathered outside of the transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from tests.numerics.harness import EAGER, full, sharded_as
from tests.ranks import two_ranks

Apply = Callable[[Any], Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()


def of(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return tuple(torch.randn(4, 8, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def x() -> Tensor:
    return of(dist.get_rank())[0]


def v() -> Tensor:
    return of(dist.get_rank())[1]


def jvp(f: Any) -> Tensor:
    return torch.func.jvp(f, (x(),), (v(),))[1]


def vjp(f: Any) -> Tensor:
    return torch.func.vjp(f, x())[1](v())[0]


def grad(f: Any) -> Tensor:
    return torch.func.grad(lambda a: f(a).pow(2).sum())(x())


def vmap(f: Any) -> Tensor:
    return torch.func.vmap(f)(x())


def jacobian(f: Any) -> Tensor:
    return torch.func.jacfwd(f)(x()) + torch.func.jacrev(f)(x())


def per_sample(f: Any) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda a: f(a).pow(2).sum()))(x())


def hessian(f: Any) -> Tensor:
    return torch.func.hessian(lambda a: f(a).pow(2).sum())(x())


def linearize(f: Any) -> Tensor:
    return torch.func.linearize(f, x())[1](v())


TRANSFORMS = (jvp, vjp, grad, vmap, jacobian, per_sample, hessian)


def sharded(form: str) -> tuple[Any, nn.Module]:
    model: Any = net()
    return sharded_as(model, form, parts=(model[0], model[2]) if form == "in parts" else ()), model


@two_ranks
@pytest.mark.parametrize("form", ["compiled", "in parts", "eager"])
def test_transforms_of_the_input_give_what_an_unsharded_model_gives(form: str) -> None:
    run, model = sharded(form)
    for transform in (*TRANSFORMS, *([linearize] if form == "eager" else [])):
        torch.testing.assert_close(transform(run), transform(net()), msg=transform.__name__)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    double = net()
    with torch.no_grad():
        for parameter in double.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(jvp(run), jvp(double))  # with the new values


@two_ranks
@pytest.mark.parametrize("transform", [jvp, grad, vmap])
def test_what_a_transform_gives_trains_the_parameters(transform: Apply) -> None:
    run, model = sharded("eager")
    transform(run).square().mean().backward()
    reference = net()
    for rank in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_rank", lambda rank=rank: rank)
            (transform(reference).square().mean() / 2).backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(full(parameter.grad), expected.grad, msg=name)


@two_ranks
@pytest.mark.parametrize("transform", [grad, jvp, vjp])
def test_refuses_a_transform_inside_of_what_is_compiled(transform: Apply) -> None:
    _, model = sharded("eager")
    compiled: Any = torch.compile(partial(transform, model), backend="fxshard", options=EAGER)
    with pytest.raises(
        fxshard.UnsupportedGraph, match=r"0.weight is read inside of a torch.func transform in compiled"
    ):
        compiled()


@two_ranks
@pytest.mark.parametrize("form", ["compiled", "eager"])
def test_refuses_a_transform_of_the_parameters(form: str) -> None:
    run, _ = sharded(form)
    whole = {name: full(parameter) for name, parameter in run.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(run, parameters, (x(),)).pow(2).sum()

    with pytest.raises(fxshard.ConfigError, match=r"0.weight is sharded: .*torch.func over parameters .*not sharded"):
        torch.func.grad(loss)(whole)


@two_ranks
def test_maps_a_batch_inside_of_what_is_compiled() -> None:
    _, model = sharded("eager")
    compiled: Any = torch.compile(partial(vmap, model), backend="fxshard", options=EAGER)
    compiled().square().mean().backward()
    torch.testing.assert_close(compiled(), vmap(net()))
    _, other = sharded("eager")
    vmap(other).square().mean().backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), full(theirs.grad))  # type: ignore[arg-type]
