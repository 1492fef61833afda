"""What training loops do around forward and backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.numerics.harness import (
    FSDP2,
    Prepare,
    Run,
    Scenario,
    Tools,
    check,
    check_against_unsharded,
    check_each,
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
    scaled,
    sgd,
    update_and_zero,
)
from tests.numerics.models import MLP, WIDTH, Block
from tests.numerics.scenarios import ONE_BLOCK, REGRESSION
from tests.pairwise import slow
from tests.ranks import two_ranks

BOTH_WAYS = pytest.mark.parametrize("prepare", [shard_and_compile, only_shard])


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


def failing(failure: str, prepare: Prepare) -> Scenario:
    def fail_before_the_third_step(run: Run, step: int) -> None:
        if run.system.ours and step == 2:
            with pytest.raises((Deliberate, RuntimeError)):
                FAILURES[failure](run)
            run.optim.zero_grad()

    return replace(ONE_BLOCK, before_step=fail_before_the_third_step, prepare=prepare)


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, slow(only_shard)])
@pytest.mark.parametrize("failure", FAILURES)
def test_trains_on_after_an_exception_in_the_middle_of_a_step(failure: str, prepare: Prepare) -> None:
    check(failing(failure, prepare))


@two_ranks
@BOTH_WAYS
def test_trains_after_an_inference(prepare: Prepare) -> None:
    check(replace(ONE_BLOCK, before_step=evaluate_once_in_inference_mode, prepare=prepare))


LOOPS = {
    "clipped gradients": replace(ONE_BLOCK, update=partial(clip_and_update, foreach=None)),
    "gradients zeroed in place": replace(ONE_BLOCK, update=update_and_zero),
    "foreach AdamW": replace(ONE_BLOCK, optimizer=foreach_adamw),
    "fused AdamW": replace(ONE_BLOCK, optimizer=fused_adamw),
    "SGD": replace(ONE_BLOCK, optimizer=sgd),
    "a scaled loss that overflows on one rank": scaled(ONE_BLOCK),
    "evaluation between steps": replace(ONE_BLOCK, before_step=evaluate),
}


@two_ranks
@BOTH_WAYS
def test_trains_with_every_kind_of_loop(prepare: Prepare) -> None:
    scenarios = {name: replace(scenario, prepare=prepare) for name, scenario in LOOPS.items()}
    runs = check_each({**scenarios, "an exception in backward": failing("fail_in_backward", prepare)})
    assert all(norm > 0.05 for norm in runs["clipped gradients"].extra), "nothing was clipped"


def update_compiled(run: Run) -> None:
    # torch's AOTAutograd cache knows a DTensor by its global shape, and gives one rank the code of another's row count.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(run.optim.step)()
    run.optim.zero_grad()


@pytest.mark.slow
@two_ranks(timeout=240)
def test_steps_a_compiled_optimizer() -> None:
    check_against_unsharded(replace(REGRESSION, update=update_compiled))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("foreach", [True, False])
def test_clips_the_norm_of_gradients(foreach: bool) -> None:
    run = check(replace(REGRESSION, update=partial(clip_and_update, foreach=foreach)))
    assert all(norm > 0.05 for norm in run.extra), "nothing was clipped"


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
    check(replace(REGRESSION, model=Pair, prepare=shard_each))


@two_ranks
def test_trains_two_sharded_models_in_turns() -> None:
    runs = [start(REGRESSION, system) for system in (fxshard_system(), fxshard_system(), FSDP2)]
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
    check(replace(REGRESSION, before_step=reset_dynamo))


@two_ranks
@BOTH_WAYS
def test_gradients_are_sharded_like_their_parameters(prepare: Prepare) -> None:
    def look(run: Run) -> None:
        for name, p in run.named_parameters().items():
            assert isinstance(p, DTensor), f"{name} is a {type(p).__name__}"
            assert isinstance(p.grad, DTensor), f"the gradient of {name} is a {type(p.grad).__name__}"
            assert p.grad.placements == p.placements, name
            assert p.grad.to_local().shape == p.to_local().shape, name
            assert p.grad.stride() == p.stride(), name

    train(replace(REGRESSION, update=look, prepare=prepare), fxshard_system())
