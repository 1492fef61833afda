"""Parameters of every kind are sharded, gathered and reduced as they should be, and begin at multiples of 16 bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fxshard
from tests.models import Chain, Doing
from tests.numerics.harness import (
    NUM_STEPS,
    Run,
    Tools,
    check,
    check_against_unsharded,
    check_bitwise,
    check_close,
    compile_module,
    full,
    only_shard,
    shard_and_compile,
    world_mesh,
)
from tests.numerics.loops import halve_gradients, remember_buffers
from tests.numerics.microbatches import in_turn, several
from tests.numerics.models import GPT, MLP, WIDTH, BatchNorm, Scalars, SelfAttention, Tables, Unused
from tests.numerics.scenarios import LANGUAGE, ONE_BLOCK, REGRESSION, SCENARIOS, TIED
from tests.pairwise import slow
from tests.ranks import two_ranks


class Signed(Tables):
    """A parameter of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8) % 2 * 2 - 1, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.signs


def recurrent() -> nn.Module:
    """torch's LSTM, which keeps a list of its own weights."""
    lstm, head = nn.LSTM(WIDTH, 7, batch_first=True), nn.Linear(7, WIDTH)
    return Doing(lambda m, x: m.head(m.lstm(x[:, None])[0][:, 0]), lstm=lstm, head=head)


@two_ranks
@pytest.mark.parametrize(
    "name",
    [
        *("uneven parameters", "fewer rows than ranks", "LoRA", "a parameter read twice", "a module called twice"),
        *("MultiheadAttention", slow("requires_grad changed")),
    ],
)
def test_trains_with(name: str) -> None:
    check(SCENARIOS[name])


@two_ranks
def test_trains_scalar_parameters() -> None:
    check_against_unsharded(replace(REGRESSION, model=Scalars))


@two_ranks
def test_reduces_a_tied_embedding_and_head_once() -> None:
    check(replace(TIED, model=partial(GPT, tied=True, num_blocks=1)))


@two_ranks
def test_leaves_frozen_parameters_alone() -> None:
    assert check(SCENARIOS["frozen parameters"]).grads["head.bias"] is None


def shard_all_but_the_bias_of_the_head(model: nn.Module, tools: Tools) -> nn.Module:
    assert isinstance(model, MLP)
    for block in model.blocks:
        tools.shard(block)
    tools.shard(model, ignored_params={model.head.bias})
    return tools.compile(model)


def shard_all_but_one_weight(model: nn.Module, tools: Tools) -> nn.Module:
    assert isinstance(model, Chain)
    tools.shard(model, ignored_params={model.blocks[1].weight})
    return tools.compile(model)


@two_ranks
def test_accumulates_beside_an_ignored_weight() -> None:
    """The backward that accumulates takes what the forward saves for the other one."""
    check_bitwise(
        replace(REGRESSION, model=partial(Chain, 3, WIDTH), prepare=shard_all_but_one_weight, backward=several)
    )


@two_ranks
def test_leaves_ignored_parameters_to_their_rank() -> None:
    run = check_bitwise(replace(ONE_BLOCK, prepare=shard_all_but_the_bias_of_the_head))
    assert {name for name, p in run.named_parameters().items() if not isinstance(p, DTensor)} == {"head.bias"}


@two_ranks
def test_keeps_integer_buffers_and_parameters_without_grad() -> None:
    check(replace(REGRESSION, model=Tables, before_step=remember_buffers))


@two_ranks
def test_shards_parameters_of_integers() -> None:
    # FSDP2 refuses them in torch 2.11.
    check_against_unsharded(replace(REGRESSION, model=Signed, before_step=remember_buffers))


@two_ranks
def test_keeps_batch_norm_statistics_per_rank() -> None:
    check_bitwise(replace(REGRESSION, model=BatchNorm, before_step=remember_buffers))


@two_ranks
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_leaves_the_gradient_of_an_unused_parameter_none(reshard_after_forward: bool | None) -> None:
    shard_kwargs = {"reshard_after_forward": reshard_after_forward}
    grads = check(replace(REGRESSION, model=Unused, shard_kwargs=shard_kwargs)).grads
    assert {name for name, grad in grads.items() if grad is None} == {"idle", "blocks.1.weight", "blocks.1.bias"}


@two_ranks
def test_multihead_attention_works_in_eager_mode() -> None:
    check(replace(LANGUAGE, model=SelfAttention, prepare=only_shard))


@two_ranks
def test_lstm_works_in_eager_mode() -> None:
    check_against_unsharded(replace(REGRESSION, model=recurrent, prepare=only_shard))


@two_ranks
@pytest.mark.parametrize("compiled", [True, False])
def test_runs_the_gradient_hooks_of_sharded_parameters(compiled: bool) -> None:
    prepare = shard_and_compile if compiled else only_shard
    check_against_unsharded(replace(ONE_BLOCK, before_step=halve_gradients, prepare=prepare))


def keep_accumulated_gradients(run: Run, step: int) -> None:
    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        run.extra.append(full(parameter.grad))

    if step == 0:
        run.named_parameters()["head.weight"].register_post_accumulate_grad_hook(keep)


@pytest.mark.slow
@two_ranks
def test_runs_the_post_accumulate_hooks_of_sharded_parameters_once_per_backward() -> None:
    run = check(replace(REGRESSION, before_step=keep_accumulated_gradients))
    assert len(run.extra) == NUM_STEPS


@two_ranks
def test_adds_to_gradients_that_are_there_already() -> None:
    def two_backwards(run: Run, step: int) -> Tensor:
        return in_turn(run, step, {}, {})

    check_close(replace(ONE_BLOCK, backward=two_backwards))


class Rope(nn.Module):
    """Complex factors behind a parameter of odd size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(1))
        self.factors = nn.Parameter(torch.randn(4, 2))
        self.shift = nn.Parameter(torch.randn(3))
        self.more = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.view_as_complex(self.factors) * torch.view_as_complex(self.more)
        return torch.view_as_real(torch.view_as_complex(x) * both) * self.scale + self.shift.sum()


class Pointers(nn.Module):
    """Says where its parameters lie."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(n) for n in (1, 3, 2, 4, 5, 8))
        self.found: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found = [part.data_ptr() % 16 for part in self.parts]
        return x * torch.cat([*self.parts]).sum()


def replicated() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


FORMS = pytest.mark.parametrize("lower", ["eager", slow("inductor"), "uncompiled"])


def made(model: nn.Module, lower: str, **kwargs: Any) -> nn.Module:
    fxshard.fully_shard(model, **kwargs)
    return model if lower == "uncompiled" else compile_module(model, {"lower": lower})


@two_ranks
@FORMS
@pytest.mark.parametrize("mesh", [replicated, world_mesh])
def test_complex_views_train_as_unsharded(lower: str, mesh: Any) -> None:
    model, plain, x = Rope(), Rope(), torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(1))
    run = made(model, lower, mesh=mesh())
    for each in (run, plain):
        each(x).square().mean().backward()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(full(parameter.grad), expected.grad, rtol=1e-5, atol=1e-6, msg=name)


@two_ranks
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_every_parameter_begins_at_a_multiple_of_16_bytes(param_dtype: torch.dtype | None) -> None:
    model = Pointers()
    made(model, "uncompiled", mesh=replicated(), mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    model(torch.ones(2)).sum().backward()
    assert model.found == [0] * 6


@two_ranks
def test_only_what_would_begin_elsewhere_is_copied() -> None:
    model = Rope()
    run = made(model, "eager", mesh=replicated())
    run(torch.ones(3, 4, 2))
    (compiled,) = fxshard.compiled_graphs(run)
    assert compiled.text.count("fxshard.copy(") == 2, compiled.text  # `scale` and `more` lie well
