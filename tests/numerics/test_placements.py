"""`shard_placement_fn`: parameters that are cut along another dimension than the first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fxshard
from fxshard.errors import UnsupportedGraph
from fxshard.runtime.parameters import local_of
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    NUM_STEPS,
    Prepare,
    Run,
    Tools,
    adopted,
    check,
    check_inductor,
    compare,
    compile_each_block,
    compile_module,
    fxshard_system,
    only_shard,
    shard_and_compile,
    sharded,
    start,
    train,
    train_step,
    with_a_break,
    world_mesh,
)
from tests.numerics.mesh_bodies import shared_folder
from tests.numerics.microbatches import kept, several
from tests.numerics.models import GPT, MLP, WIDTH
from tests.numerics.scenarios import LANGUAGE, REGRESSION, TIED
from tests.pairwise import slow
from tests.ranks import two_ranks


def last_dim(parameter: nn.Parameter) -> Shard | None:
    """Cut matrices and what has more dimensions along the last one that two ranks share evenly."""
    even = [dim for dim in range(1, parameter.dim()) if parameter.shape[dim] % 2 == 0]
    return Shard(even[-1]) if even else None


class Experts(nn.Module):
    """Two experts in one tensor, which every row goes through, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(torch.randn(3, WIDTH, 5) / WIDTH)
        self.conv = nn.Conv1d(5, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bi,eio->beo", self.norm(x), self.up)
        y = self.conv(y.transpose(1, 2)).flatten(1)
        return x + y[:, :WIDTH].tanh()


def many_dims() -> nn.Module:
    """Blocks of parameters with one to three dimensions."""
    return MLP(block=Experts)


COLUMNS = {"shard_placement_fn": last_dim}
BASE = replace(REGRESSION, model=many_dims, shard_kwargs=COLUMNS)


@two_ranks
@pytest.mark.parametrize(
    "prepare", [shard_and_compile, only_shard, adopted, slow(compile_each_block), slow(with_a_break)]
)
def test_trains_what_is_cut_along_other_dimensions(prepare: Prepare) -> None:
    check(replace(BASE, prepare=prepare))


@two_ranks
@pytest.mark.slow
@pytest.mark.parametrize("backward", [several, kept])
def test_adds_up_gradients_of_what_is_cut_along_other_dimensions(backward: Any) -> None:
    check(replace(BASE, backward=backward))


MODELS = {"MLP": REGRESSION, "GPT": LANGUAGE, "tied": replace(TIED, model=partial(GPT, tied=True, num_blocks=1))}


@two_ranks
@pytest.mark.parametrize("name", [slow("MLP"), slow("GPT"), "tied"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_trains_embeddings_and_linear_layers_by_columns(name: str, reshard_after_forward: bool) -> None:
    check(replace(MODELS[name], shard_kwargs={**COLUMNS, "reshard_after_forward": reshard_after_forward}))


@pytest.mark.slow
@two_ranks
def test_compiled_code_trains_what_is_cut_along_other_dimensions() -> None:
    check_inductor(BASE)


@two_ranks
def test_parameters_and_gradients_lie_as_those_of_fsdp2() -> None:
    ours, theirs = start(BASE, fxshard_system()), start(BASE, FSDP2)
    for run in (ours, theirs):
        train_step(run, 0)
        run.loss(1).backward()
    expected: Any = theirs.named_parameters()
    found: Any = ours.named_parameters()
    for name, parameter in found.items():
        assert parameter.placements == expected[name].placements, name
        assert parameter.grad.placements == expected[name].grad.placements, name
        assert local_of(parameter).shape == local_of(expected[name]).shape
        assert local_of(parameter.grad).shape == local_of(parameter).shape


def there_and_back(run: Run, step: int) -> None:
    """Take the model over from FSDP2 before the second step, and give it back before the last."""
    if run.system.ours and step == 1:
        fxshard.adopt(run.model)
    if run.system.ours and step == NUM_STEPS - 1:
        fxshard.release(run.model)


def by_torch(model: nn.Module, tools: Tools) -> nn.Module:
    return only_shard(model, replace(tools, system=replace(tools.system, fully_shard=FSDP2.fully_shard)))


def fused(parameters: Any, overlaps: bool = False) -> Any:
    optim = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    return fxshard.overlap_step(optim) if overlaps else optim


@two_ranks
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_fused_optimizer_goes_on_where_parameters_change_hands(overlaps: bool) -> None:
    """Fused kernels walk through the memory of parameters and state side by side."""
    optimizer = partial(fused, overlaps=overlaps)
    scenario = replace(BASE, prepare=by_torch, before_step=there_and_back, optimizer=optimizer)
    ours = train(scenario, fxshard_system(dtype=torch.float64))
    compare(ours, train(scenario, replace(FSDP2, dtype=torch.float64)), rtol=1e-9, atol=1e-11)


@two_ranks
def test_what_a_module_reads_is_contiguous() -> None:
    run = start(replace(BASE, prepare=only_shard), fxshard_system())
    seen: list[bool] = []
    block: Any = next(iter(run.model.blocks))  # type: ignore[arg-type]
    block.register_forward_pre_hook(lambda module, args: seen.append(module.up.is_contiguous()))
    train_step(run, 0)
    assert seen == [True]


class Writes(nn.Linear):
    """Writes into its weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


@two_ranks
@pytest.mark.parametrize("compiled", [True, False])
def test_refuses_a_write_into_what_is_cut_along_another_dimension(compiled: bool) -> None:
    model: Any = fxshard.fully_shard(Writes(WIDTH, WIDTH), mesh=world_mesh(), shard_placement_fn=last_dim)
    model = compile_module(model, options=EAGER) if compiled else model
    with pytest.raises(UnsupportedGraph, match="change would be lost"):
        model(torch.ones(2, WIDTH))


def sharded_and_stepped(seed: int, fn: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = sharded(many_dims(), mesh=world_mesh(), shard_placement_fn=fn)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, WIDTH)).square().mean().backward()
    optim.step()
    optim.zero_grad()
    return model, optim


@two_ranks
def test_full_state_has_no_trace_of_the_dimension() -> None:
    """It goes from a model cut along one dimension into one that is cut along another, and back."""
    model, optim = sharded_and_stepped(0, last_dim)
    weights = fxshard.full_state_dict(model, recipient_rank=None)
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=None)
    plain = many_dims()
    plain.load_state_dict(weights)
    for fn in (None, last_dim):
        other, other_optim = sharded_and_stepped(1, fn)
        fxshard.load_full_state_dict(other, weights)
        fxshard.load_full_optim_state_dict(other, other_optim, state)
        torch.testing.assert_close(fxshard.full_state_dict(other, recipient_rank=None), weights, rtol=0, atol=0)
        found = fxshard.full_optim_state_dict(other, other_optim, recipient_rank=None)
        torch.testing.assert_close(found["state"], state["state"], rtol=0, atol=0)


@two_ranks
def test_a_checkpoint_loads_along_another_dimension() -> None:
    model, optim = sharded_and_stepped(0, last_dim)
    folder = shared_folder()
    fxshard.save_checkpoint(f"{folder}/last", model, optim)
    expected = fxshard.full_state_dict(model, recipient_rank=None)
    for fn in (None, last_dim):
        other, other_optim = sharded_and_stepped(1, fn)
        fxshard.load_checkpoint(f"{folder}/last", other, other_optim)
        torch.testing.assert_close(fxshard.full_state_dict(other, recipient_rank=None), expected, rtol=0, atol=0)
