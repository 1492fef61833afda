"""Accumulation where a unit is called several times: FSDP2 reduces it in two parts, and so does the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from tests.numerics.harness import (
    FSDP2,
    NUM_STEPS,
    Run,
    Scenario,
    Tools,
    check_against_unsharded,
    check_bitwise,
    check_inductor,
    check_sums_in_few_bits,
    compare,
    full,
    fxshard_system,
    only_compile,
    train,
)
from tests.numerics.loops import remember_buffers
from tests.numerics.microbatches import forwards_ahead, in_turn, now_and_then, several, with_no_sync
from tests.numerics.models import MLP, WIDTH, rows, rows_of_many_sizes
from tests.pairwise import slow
from tests.ranks import two_ranks


class Shared(nn.Module):
    """Has a unit besides the root's, which its forward may call often."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.shared: nn.Module = nn.Linear(WIDTH, WIDTH)


class AroundANorm(Shared):
    """Calls it before and after a norm."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.shared(self.norm(self.shared(x))))


class ThreeTimes(Shared):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.shared(x))
        return cast(Tensor, self.shared(x))


class BothSides(Shared):
    """Calls it on two parts of the batch: neither call's input gets a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[:, :6].repeat(1, 2), x[:, 6:].repeat(1, 2)
        return cast(Tensor, self.norm(torch.tanh(self.shared(left)) * self.shared(right)))


class BothSidesOfATrunk(Shared):
    """Calls it on two parts of what another unit made of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        left, right = x[:, :6].repeat(1, 2), x[:, 6:].repeat(1, 2)
        return torch.tanh(self.shared(left)) * cast(Tensor, self.shared(right))


class FromADetachedState(Shared):
    """The second call's input gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.shared(x)
        return torch.tanh(self.shared(first.detach())) + cast(Tensor, self.norm(first))


class WithATarget(Shared):
    """The first call is outside of autograd."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target: Tensor = self.shared(x)
        y: Tensor = self.shared(self.norm(x))
        return y - target


class OneOrTheOther(nn.Module):
    """Reads one of its layers in its first call, and both or the other one in later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, call: int) -> Tensor:
        x = torch.tanh(self.a(x)) if call != 1 else x
        return cast(Tensor, self.b(x) if call > 0 else x)


class PartByPart(Shared):
    """Each parameter of the shared unit is read by some of its calls only."""

    order: tuple[int, ...] = (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.shared = OneOrTheOther()

    def forward(self, x: Tensor) -> Tensor:
        for call in self.order:
            x = self.norm(self.shared(x, call))
        return x


class PartAfterPart(PartByPart):
    order = (1, 0, 2)


class AcrossABreak(PartByPart):
    """The unit's parameters are those of two graphs; in each of them it is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.shared(x, 0))
        torch._dynamo.graph_break()
        for _ in range(2):
            x = torch.tanh(self.shared(x, 1))
        return x


class Checkpointed(Shared):
    """Its calls are computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.norm(checkpoint(self.shared, x, use_reentrant=False))
        return x


class Nested(Shared):
    """A unit of which another one is a part, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.shared(self.norm(self.shared(torch.tanh(self.shared(x))))))


def shard_the_shared(model: nn.Module, tools: Tools) -> nn.Module:
    if isinstance(model, Nested):
        tools.shard(cast(nn.Sequential, model.shared)[0])
    tools.shard(cast(Shared, model).shared)
    tools.shard(model)
    return tools.compile(model)


class Pair(nn.Module):
    """Two layers that are one unit, called in turn as often as it says."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = self.norm(self.b(torch.tanh(self.a(x))))
        return x


def shard_the_pair(model: nn.Module, tools: Tools) -> nn.Module:
    pair = cast(Pair, model)
    tools.shard([pair.a, pair.b])
    tools.shard(model)
    return tools.compile(model)


def scenario(model: Callable[[], nn.Module] = AroundANorm, **changes: Any) -> Scenario:
    given = {"batch": rows(), "backward": several, "prepare": shard_the_shared, **changes}
    return Scenario(model=model, **given)


MODELS = [
    AroundANorm,
    ThreeTimes,
    slow(BothSides),
    slow(BothSidesOfATrunk),
    slow(FromADetachedState),
    slow(WithATarget),
    slow(PartByPart),
    slow(PartAfterPart),
    slow(AcrossABreak),
    slow(Checkpointed),
    slow(Nested),
]


@two_ranks
@pytest.mark.parametrize("model", MODELS)
def test_adds_up_a_unit_of_several_calls_as_fsdp2_does(model: Callable[[], nn.Module]) -> None:
    check_bitwise(scenario(model, before_step=remember_buffers))


@pytest.mark.slow
@two_ranks
def test_adds_up_microbatches_of_different_shapes_as_fsdp2_does() -> None:
    check_bitwise(scenario(batch=rows_of_many_sizes, before_step=remember_buffers))


class Rounds(MLP):
    """Runs through its blocks several times."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return cast(Tensor, self.head(x))


@pytest.mark.slow
@two_ranks
def test_adds_up_units_that_torch_compile_made_as_fsdp2_does() -> None:
    check_bitwise(scenario(Rounds, backward=with_no_sync, prepare=only_compile))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("rounds", [1, 2])
def test_takes_modules_that_are_one_unit_for_one_call(rounds: int) -> None:
    check_bitwise(scenario(functools.partial(Pair, rounds), prepare=shard_the_pair))


@two_ranks
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"),
    [
        (torch.bfloat16, torch.float32),
        slow(torch.bfloat16, None),
        slow(torch.bfloat16, torch.bfloat16),
        slow(None, torch.bfloat16),
    ],
)
def test_adds_up_in_mixed_precision_as_fsdp2_does(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    check_sums_in_few_bits(scenario(ThreeTimes, shard_kwargs={"mp_policy": policy}))


def two_sums(run: Run, step: int) -> Tensor:
    """Two times two microbatches, whose sums are added to each other's gradients."""
    return in_turn(run, step, *({"requires_gradient_sync": i % 2 == 1} for i in range(4)))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("backward", [forwards_ahead, now_and_then, two_sums])
def test_adds_to_gradients_that_are_there_as_fsdp2_does(backward: Callable[[Run, int], Tensor]) -> None:
    check_bitwise(scenario(backward=backward))


@two_ranks
def test_hooks_see_the_whole_gradient_once() -> None:
    seen: list[Tensor] = []

    def watched(model: nn.Module, tools: Tools) -> nn.Module:
        compiled = shard_the_shared(model, tools)
        for parameter in cast(Shared, model).shared.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(full(cast(Tensor, p.grad))))
        return compiled

    ours = train(scenario(prepare=watched), fxshard_system())
    compare(ours, train(scenario(), FSDP2), rtol=0.0, atol=0.0)
    assert len(seen) == 2 * NUM_STEPS
    for value, name in zip(seen[:2], ("shared.weight", "shared.bias"), strict=True):  # grads are of the first step
        torch.testing.assert_close(value, ours.grads[name], rtol=0.0, atol=0.0)


@pytest.mark.slow
@two_ranks
def test_the_sum_of_both_parts_is_the_gradient() -> None:
    check_against_unsharded(scenario(ThreeTimes))
    check_against_unsharded(scenario(AcrossABreak))


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_adds_up_a_unit_of_several_calls() -> None:
    check_inductor(scenario(ThreeTimes))
