"""`swa_utils.AveragedModel` beside the one-line form: refused where no update could follow, exact where one can."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fxshard.errors import ConfigError
from tests.numerics.harness import (
    EAGER,
    Run,
    Tools,
    check_against_unsharded,
    compile_module,
    full,
    fxshard_system,
    only_compile,
    start,
    train_step,
    update,
)
from tests.numerics.models import MLP, WIDTH, rows
from tests.numerics.scenarios import ONE_BLOCK, SCENARIOS
from tests.pairwise import slow
from tests.ranks import two_ranks

DECAY = 0.5
REFUSAL = r"(?s)AveragedModel.*{}.*fully_shard\(averaged\).*model\.named_parameters\(\)"


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MLP()


def compiled(model: nn.Module) -> nn.Module:
    return compile_module(model, options=EAGER)


def call(model: nn.Module) -> Tensor:
    return model(rows()(0, dist.get_rank())[0])


# ---- what is refused


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("of_the_wrapper", [True, slow(False)])
def test_refuses_an_averaged_model_that_was_made_before_the_first_call(of_the_wrapper: bool) -> None:
    model = mlp()
    wrapper = compiled(model)
    averaged = AveragedModel(wrapper if of_the_wrapper else model)
    with pytest.raises(ConfigError, match=REFUSAL.format(r"blocks\.0\.norm\.weight.*head\.bias")):
        call(wrapper)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    del averaged
    call(wrapper)


@two_ranks
def test_refuses_the_average_of_a_part_of_the_model() -> None:
    model = mlp()
    averaged = AveragedModel(model.get_submodule("head"))
    with pytest.raises(ConfigError, match=REFUSAL.format(r"parameters: head\.weight, head\.bias\.")):
        call(compiled(model))
    del averaged


# ---- what is let be


def frozen_reference(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


def average_of_another(model: nn.Module) -> nn.Module:
    return AveragedModel(mlp(seed=1))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("make", [frozen_reference, average_of_another])
def test_lets_other_models_be(make: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp()
    other = make(model)
    call(compiled(model)).sum().backward()
    assert not any(isinstance(p, DTensor) for p in other.parameters())


@pytest.mark.slow
@two_ranks
def test_lets_an_averaged_model_be_that_waits_for_the_garbage_collector() -> None:
    model = mlp()
    averaged = AveragedModel(model)
    averaged.__dict__["itself"] = averaged
    gc.disable()
    try:
        del averaged
        call(compiled(model))
    finally:
        gc.enable()


# ---- what the refusal proposes


class Averaging:
    """Keeps an average of the model in every step, and compares it and what it computes."""

    def prepare(self, model: nn.Module, tools: Tools) -> nn.Module:
        """Make the averaged model before the first call, sharded as the model will be."""
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        tools.shard(self.averaged)
        return only_compile(model, tools)

    def update(self, run: Run) -> None:
        """Step, and average."""
        update(run)
        self.averaged.update_parameters(run.model)
        run.extra.extend(full(p) for p in self.averaged.parameters())
        run.extra.append(self.averaged(torch.ones(2, WIDTH, dtype=run.system.dtype)).detach())


@two_ranks
def test_updates_and_evaluates_an_averaged_model_that_is_sharded_as_well() -> None:
    averaging = Averaging()
    check_against_unsharded(replace(ONE_BLOCK, prepare=averaging.prepare, update=averaging.update))


@pytest.mark.slow
@two_ranks
def test_keeps_averages_in_tensors_made_after_the_first_call() -> None:
    run = start(SCENARIOS["one line"], fxshard_system())
    train_step(run, 0)
    averages = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    expected = {name: full(p) for name, p in averages.items()}
    for step in range(1, 4):
        train_step(run, step)
        with torch.no_grad():
            for name, p in run.model.named_parameters():
                averages[name].lerp_(p, 1 - DECAY)
                expected[name].lerp_(full(p), 1 - DECAY)
    assert all(isinstance(average, DTensor) for average in averages.values())
    for name, average in averages.items():
        torch.testing.assert_close(full(average), expected[name], rtol=0.0, atol=0.0)
