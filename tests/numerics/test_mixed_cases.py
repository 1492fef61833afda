"""What training programs mix: steps inside of backward, evaluation before it, fp16 with a scaled loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fxshard.sharding.sharded_module import plain_module
from tests.numerics.harness import (
    UNSHARDED,
    Prepare,
    Run,
    check,
    check_against_unsharded,
    check_bitwise,
    fxshard_system,
    only_shard,
    shard_and_compile,
    train,
)
from tests.numerics.loops import output_of_fixed_rows, scaled, step_in_backward
from tests.numerics.models import MLP, WIDTH, CalledTwice
from tests.numerics.scenarios import ONE_BLOCK, REGRESSION, TIED
from tests.pairwise import slow
from tests.ranks import two_ranks

BOTH_WAYS = pytest.mark.parametrize("prepare", [shard_and_compile, slow(only_shard)])


def nothing_is_left_to_do(run: Run) -> None:
    assert all(parameter.grad is None for parameter in run.model.parameters())


@two_ranks
@BOTH_WAYS
@pytest.mark.parametrize("model", [CalledTwice, slow(MLP)])
def test_steps_in_backward_by_hooks_of_parameters(model: Callable[[], nn.Module], prepare: Prepare) -> None:
    steps: dict[str, Any] = {"before_step": step_in_backward, "update": nothing_is_left_to_do}
    check_against_unsharded(replace(REGRESSION, model=model, prepare=prepare, **steps))


@two_ranks
@pytest.mark.slow
def test_steps_in_backward_an_embedding_that_is_the_head() -> None:
    check_against_unsharded(replace(TIED, before_step=step_in_backward, update=nothing_is_left_to_do))


class TwoHeads(nn.Module):
    """Has a unit that leads to an output which the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks[0](x).tanh()
        return x, self.blocks[1](x)


def loss_of_the_first(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x)[0] - y).square().mean()


@two_ranks
def test_an_output_that_the_loss_leaves_out_gives_zeros_and_changes_nothing_else() -> None:
    scenario = replace(REGRESSION, model=TwoHeads, loss=loss_of_the_first)
    ours = train(scenario, fxshard_system(dtype=torch.float64))
    theirs = train(scenario, UNSHARDED)
    for name, grad in theirs.grads.items():
        expected = torch.zeros_like(theirs.params[name]) if grad is None else grad
        assert (grad is None) == name.startswith("blocks.1")
        torch.testing.assert_close(ours.grads[name], expected, rtol=1e-9, atol=1e-11)


def a_part_and_then_the_whole(run: Run, step: int) -> Tensor:
    x, _ = run.batch(step)
    first: Tensor = plain_module(run.model).get_submodule("blocks.0")(x).square().mean()
    first.backward()
    loss = run.loss(step)
    loss.backward()
    return loss.detach() + first.detach()


@two_ranks
@BOTH_WAYS
def test_trains_a_part_alone_and_then_the_whole(prepare: Prepare) -> None:
    check_against_unsharded(replace(ONE_BLOCK, backward=a_part_and_then_the_whole, prepare=prepare))


def evaluate_before_backward(run: Run, step: int) -> Tensor:
    loss = run.loss(step)
    run.model.eval()
    with torch.no_grad():
        run.extra.append(output_of_fixed_rows(run))
    run.model.train()
    loss.backward()
    return loss


@two_ranks
@BOTH_WAYS
def test_evaluates_between_forward_and_backward(prepare: Prepare) -> None:
    check(replace(ONE_BLOCK, backward=evaluate_before_backward, prepare=prepare))


@two_ranks
def test_scales_the_loss_of_a_model_that_computes_in_fp16() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    check_bitwise(scaled(replace(ONE_BLOCK, shard_kwargs={"mp_policy": policy})))
