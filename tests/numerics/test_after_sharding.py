"""What libraries do to modules and optimizers whose parameters are sharded already: refused by name, or right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.optim import Adafactor, AdamW, Optimizer, Rprop

import fxshard
from tests.models import Doing
from tests.numerics.harness import EAGER, compile_module, full
from tests.pairwise import each_once, slow
from tests.ranks import two_ranks

Change = Callable[[Any], Any]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Summed(nn.Module):
    """Of two tensors."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight / 2, weight / 2


def scaled() -> nn.Module:
    parts = {"scale": nn.Parameter(torch.rand(8)), "shift": nn.Parameter(torch.rand(7))}
    return Doing(lambda m, x: (x * m.scale)[:, :7] * m.shift + m.shift.sin(), **parts)


def mlp(change: Change | None = None, *, bias: bool = True) -> nn.Sequential:
    first = nn.Linear(8, 8, bias=bias)
    if change is not None:
        change(first)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 6))


def batch() -> Tensor:
    return torch.arange(24.0).view(3, 8).sin()


def sharded(model: nn.Module, how: str, *args: Any, **kwargs: Any) -> nn.Module:
    """Shard a model by `fully_shard` or by its first compiled call, on these arguments."""
    if how == "fully_shard":
        return fxshard.fully_shard(model)
    compiled = compile_module(model, options=EAGER)
    with torch.no_grad():
        compiled(*args, **kwargs)
    return compiled


both_ways = pytest.mark.parametrize("how", ["fully_shard", "one line"])
pruned = partial(prune.l1_unstructured, name="weight", amount=0.5)
doubled = partial(register_parametrization, tensor_name="weight", parametrization=Doubled())
summed = partial(register_parametrization, tensor_name="weight", parametrization=Summed())

REFUSED = r"sharded parameters.*: 0\.weight\..*before fully_shard"
MOVES: dict[str, Change] = {
    "l1_unstructured": pruned,
    "random_unstructured": partial(prune.random_unstructured, name="weight", amount=0.5),
    "prune.identity": partial(prune.identity, name="weight"),
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "register_parametrization": doubled,
    "of two tensors": summed,
    "del": lambda layer: delattr(layer, "weight"),
}


@two_ranks
@both_ways
def test_refuses_to_take_a_sharded_parameter_from_its_module(how: str) -> None:
    model = mlp()
    compiled = sharded(model, how, batch())
    with torch.no_grad():
        before = compiled(batch())
    compiled(batch()).sum().backward()  # and resharded
    for change in MOVES.values():
        with pytest.raises(fxshard.ConfigError, match=REFUSED):
            change(model[0])
    torch.testing.assert_close(compiled(batch()), before)


@two_ranks
@pytest.mark.parametrize("change", [spectral_norm, weight_norm])
def test_refuses_norms_that_take_the_parameter_away_first(change: Change) -> None:
    model = fxshard.fully_shard(mlp())
    warns = pytest.warns(FutureWarning) if change is weight_norm else nullcontext()
    with warns, pytest.raises(fxshard.ConfigError, match=REFUSED):
        change(model[0])


@two_ranks
@pytest.mark.parametrize("change", [pruned, spectral_norm])
def test_refuses_it_while_the_parameter_is_unsharded_after_a_forward(change: Change) -> None:
    model = fxshard.fully_shard(mlp())
    model(batch())
    with pytest.raises(fxshard.ConfigError, match=REFUSED):
        change(model[0])


@two_ranks
@each_once(how=["fully_shard", "one line"], bias=[True, False])
def test_refuses_to_remove_parametrizations_of_sharded_parameters(how: str, bias: bool) -> None:
    for change, originals in ((doubled, "original"), (summed, r"original0, .*original1")):
        model = mlp(change, bias=bias)
        compiled = sharded(model, how, batch())
        for parameter in model.parameters():
            parameter.requires_grad_(change is doubled)  # what is frozen is registered as a buffer
        compiled(batch())
        with pytest.raises(fxshard.ConfigError, match=rf"sharded.*: 0\.parametrizations\.weight\.{originals}\."):
            remove_parametrizations(model[0], "weight")
        torch._dynamo.reset()


@two_ranks
def test_leaves_parametrizations_of_buffers_alone() -> None:
    inner = nn.Module()
    inner.register_buffer("table", torch.ones(3))
    register_parametrization(inner, "table", Doubled())
    fxshard.fully_shard(nn.Sequential(nn.Linear(2, 2), inner))
    remove_parametrizations(inner, "table")
    assert torch.equal(inner.table, torch.full((3,), 2.0))  # type: ignore[arg-type]


@two_ranks
@both_ways
def test_trains_with_one_more_parametrization_of_what_has_one(how: str) -> None:
    plain = mlp(doubled)
    model = copy.deepcopy(plain)
    compiled = sharded(model, how, batch())
    for layer in (plain[0], model[0]):
        register_parametrization(layer, "weight", Doubled())
    train_alike(compiled, plain, AdamW)


@two_ranks
def test_refuses_to_undo_pruning_while_the_parameter_is_unsharded_after_a_forward() -> None:
    """Otherwise it is torch's error: a mask does not meet a shard."""
    model = fxshard.fully_shard(mlp(pruned))
    model(batch())
    with pytest.raises(fxshard.ConfigError, match=r"sharded parameters.*: 0\.weight_orig\..*pruning"):
        prune.remove(model[0], "weight")


HF_ADAFACTOR = partial(transformers.optimization.Adafactor, beta1=0.9, weight_decay=0.1)


def train_alike(model: nn.Module, plain: nn.Module, build: Callable[..., Optimizer]) -> None:
    """Train both for three steps on one batch, and compare their parameters."""
    for each in (model, plain):
        optim = build(each.parameters())
        for _ in range(3):
            each(batch()).square().sum().backward()
            optim.step()
            optim.zero_grad()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(ours), expected.detach(), rtol=1e-6, atol=1e-6)


@two_ranks
@both_ways
@pytest.mark.parametrize(
    ("build", "model", "named"),
    [
        (Adafactor, mlp, r"0\.weight, 0\.bias, 2\.weight, 2\.bias"),
        slow(partial(Adafactor, foreach=True), mlp, r"0\.weight, 0\.bias, 2\.weight, 2\.bias"),
        (Adafactor, scaled, "scale, shift"),  # torch's own numbers are those of a rank's rows
        (HF_ADAFACTOR, mlp, r"0\.weight, 2\.weight"),
        (Rprop, mlp, r"0\.weight, 0\.bias, 2\.weight, 2\.bias"),
    ],
)
def test_refuses_optimizers_that_need_whole_parameters(
    how: str, build: Callable[..., Optimizer], model: Callable[[], nn.Module], named: str
) -> None:
    compiled = sharded(model(), how, batch())
    before = [full(parameter) for parameter in compiled.parameters()]
    optim = build(compiled.parameters())
    for overlaps in (False, True):
        if overlaps:
            fxshard.overlap_step(optim)
        compiled(batch()).square().sum().backward()
        with pytest.raises(fxshard.ConfigError, match=rf"\(.*\) cannot step.*: {named}\. .*whole_matrices"):
            optim.step()
    for parameter, expected in zip(compiled.parameters(), before, strict=True):
        assert torch.equal(full(parameter), expected)


@two_ranks
@both_ways
def test_trains_vectors_with_the_adafactor_of_transformers(how: str) -> None:
    plain = scaled()
    train_alike(sharded(copy.deepcopy(plain), how, batch()), plain, HF_ADAFACTOR)


@two_ranks
@both_ways
def test_trains_with_rprop_on_whole_parameters(how: str) -> None:
    def build(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optim = Rprop(parameters)
        is_sharded = isinstance(optim.param_groups[0]["params"][0], DTensor)
        return fxshard.whole_matrices(optim) if is_sharded else optim

    plain = mlp()
    train_alike(sharded(copy.deepcopy(plain), how, batch()), plain, build)


@two_ranks
@both_ways
def test_a_hook_of_several_gradients_that_would_never_be_called_is_refused(how: str) -> None:
    seen: list[Tensor] = []
    model = sharded(mlp(), how, batch())
    handle = register_multi_grad_hook(tuple(model.parameters()), seen.append, mode="any")
    model(batch()).sum().backward()
    assert len(seen) == 1
    handle.remove()
    register_multi_grad_hook(tuple(model.parameters()), lambda grads: None)
    with pytest.raises(
        fxshard.UnsupportedGraph, match=r"register_multi_grad_hook\(mode='all'\).*would never be called"
    ):
        model(batch()).sum().backward()


@two_ranks
def test_leaves_adafactor_of_other_models_alone() -> None:
    fxshard.fully_shard(mlp())
    plain = nn.Linear(8, 6)
    train_alike(copy.deepcopy(plain), plain, Adafactor)
