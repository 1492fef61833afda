"""What training loops do around forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.numerics.harness import (
    FSDP2,
    Run,
    Scenario,
    Tools,
    check,
    check_against_unsharded,
    compare,
    fxshard_system,
    only_shard,
    shard_and_compile,
    shard_blocks,
    start,
    train,
    train_step,
)
from tests.numerics.loops import (
    clip_and_update,
    evaluate,
    evaluate_once_in_inference_mode,
    foreach_adamw,
    fused_adamw,
    sgd,
    update_and_zero,
)
from tests.numerics.models import MLP, WIDTH, Block, rows
from tests.numerics.scenarios import REGRESSION, SCENARIOS
from tests.pairwise import slow
from tests.ranks import two_ranks

Prepare = Callable[[nn.Module, Tools], nn.Module]
BOTH_WAYS = pytest.mark.parametrize("prepare", [shard_and_compile, only_shard])


@two_ranks
@BOTH_WAYS
def test_evaluates_between_training_steps(prepare: Prepare) -> None:
    check(Scenario(model=MLP, batch=rows(), before_step=evaluate, prepare=prepare))


@two_ranks
@BOTH_WAYS
def test_evaluates_in_inference_mode_before_the_first_training_step(prepare: Prepare) -> None:
    check(Scenario(model=MLP, batch=rows(), before_step=evaluate_once_in_inference_mode, prepare=prepare))


class Deliberate(Exception):
    """Raised by the tests, in the middle of a step."""


def fail_after_forward(run: Run) -> None:
    run.loss(1)
    raise Deliberate


def fail_in_forward(run: Run) -> None:
    run.model(torch.zeros(3, WIDTH + 1, dtype=run.system.dtype))


def fail_in_backward(run: Run) -> None:
    def fail(grad: Tensor) -> None:
        raise Deliberate

    x, y = run.batch(1)
    x.requires_grad_()
    output = run.model(x)
    output.register_hook(fail)
    (output - y).square().mean().backward()


def fail_late_in_backward(run: Run) -> None:
    def fail(grad: Tensor) -> None:
        raise Deliberate

    x, y = run.batch(1)
    x.requires_grad_().register_hook(fail)
    (run.model(x) - y).square().mean().backward()


FAILURES = {f.__name__: f for f in (fail_after_forward, fail_in_forward, fail_in_backward, fail_late_in_backward)}


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, slow(only_shard)])
@pytest.mark.parametrize("failure", [name if name == "fail_in_backward" else slow(name) for name in FAILURES])
def test_trains_on_after_an_exception_in_the_middle_of_a_step(failure: str, prepare: Prepare) -> None:
    def fail_before_the_third_step(run: Run, step: int) -> None:
        if run.system.ours and step == 2:
            with pytest.raises((Deliberate, RuntimeError)):
                FAILURES[failure](run)
            run.optim.zero_grad()

    check(Scenario(model=MLP, batch=rows(), before_step=fail_before_the_third_step, prepare=prepare))


@two_ranks
@BOTH_WAYS
def test_zeroes_gradients_in_place(prepare: Prepare) -> None:
    check(Scenario(model=MLP, batch=rows(), update=update_and_zero, prepare=prepare))


def update_compiled(run: Run) -> None:
    # torch's AOTAutograd cache knows a DTensor by its global shape, and gives one rank the code of another's row count.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(run.optim.step)()
    run.optim.zero_grad()


@pytest.mark.slow
@two_ranks(timeout=240)
def test_steps_a_compiled_optimizer() -> None:
    check_against_unsharded(Scenario(model=MLP, batch=rows(), update=update_compiled))


@two_ranks
@pytest.mark.parametrize("foreach", [slow(True), slow(False), None])
def test_clips_the_norm_of_gradients(foreach: bool | None) -> None:
    run = check(Scenario(model=MLP, batch=rows(), update=partial(clip_and_update, foreach=foreach)))
    assert all(norm > 0.05 for norm in run.extra), "nothing was clipped"


@two_ranks
def test_skips_on_all_ranks_the_step_whose_scaled_gradients_overflow_on_one() -> None:
    check(SCENARIOS["GradScaler"])


@two_ranks
@pytest.mark.parametrize("optimizer", [foreach_adamw, fused_adamw, sgd])
def test_trains_with_optimizer(optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]) -> None:
    check(Scenario(model=MLP, batch=rows(), optimizer=optimizer))


class Pair(nn.Module):
    """Two models that are sharded each by itself, under a root that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = MLP()
        self.decoder = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def shard_each(model: nn.Module, tools: Tools) -> nn.Module:
    assert isinstance(model, Pair)
    for child in (model.encoder, model.decoder):
        shard_blocks(child, tools)
        tools.compile_in_place(child)
    return model


@pytest.mark.slow
@two_ranks
def test_trains_two_sharded_models_with_one_loss_through_both() -> None:
    check(Scenario(model=Pair, batch=rows(), prepare=shard_each))


@two_ranks
def test_trains_two_sharded_models_in_turns() -> None:
    scenario = REGRESSION
    runs = [start(scenario, system) for system in (fxshard_system(), fxshard_system(), FSDP2)]
    for step in range(3):
        for run in runs:
            train_step(run, step)
    first, second, reference = runs
    compare(first, reference, rtol=0.0, atol=0.0)
    compare(second, reference, rtol=0.0, atol=0.0)


def reset_dynamo(run: Run, step: int) -> None:
    if step == 2:
        torch._dynamo.reset()


@pytest.mark.slow
@two_ranks
def test_trains_on_after_a_reset_of_dynamo() -> None:
    check(Scenario(model=MLP, batch=rows(), before_step=reset_dynamo))


@two_ranks
def test_gradients_are_sharded_like_their_parameters() -> None:
    def look(run: Run) -> None:
        for name, p in run.named_parameters().items():
            assert isinstance(p, DTensor), f"{name} is a {type(p).__name__}"
            assert isinstance(p.grad, DTensor), f"the gradient of {name} is a {type(p.grad).__name__}"
            assert p.grad.placements == p.placements, name
            assert p.grad.to_local().shape == p.to_local().shape, name
            assert p.grad.stride() == p.stride(), name

    train(Scenario(model=MLP, batch=rows(), update=look), fxshard_system())
