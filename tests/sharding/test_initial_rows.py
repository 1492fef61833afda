"""Ranks of a CPU mesh that draw the same rows for different shards are warned."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxshard
from fxshard.sharding import initial_rows
from tests.models import Doing
from tests.numerics.harness import EAGER, compile_module
from tests.ranks import two_ranks
from tests.watching import said_by


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5))
    fxshard.fully_shard(model[0])
    fxshard.fully_shard(model)
    return model


def initialise(model: nn.Module, seed: int) -> None:
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    for part in model.children():
        part.reset_parameters()  # type: ignore[operator]


def one_seed(model: nn.Module) -> None:
    initialise(model, 0)


def seeds(model: nn.Module) -> None:
    initialise(model, dist.get_rank())


def ones(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)


def loaded(model: nn.Module) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5))
    model.to_empty(device="cpu")
    fxshard.load_full_state_dict(model, whole.state_dict())


def recomputed(module: nn.Module, x: Tensor) -> Tensor:
    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.select.int else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    result: Tensor = checkpoint(module, x, use_reentrant=False, context_fn=contexts)
    return result


def said(model: nn.Module, *, compiled: bool = False) -> list[str]:
    run = compile_module(model, EAGER) if compiled else model
    with said_by(initial_rows.__name__) as lines:
        for _ in range(2):
            run(torch.ones(2, 6)).sum().backward()
    return lines


@two_ranks
@pytest.mark.parametrize("compiled", [False, True])
def test_equal_rows_are_named_once(compiled: bool) -> None:
    model = on_meta()
    one_seed(model)
    (line,) = said(model, compiled=compiled)
    names = line.removeprefix("fxshard: ranks initialised the same rows of ").partition(": torch draws the same")[0]
    assert {*names.split(", ")} == {"0.weight", "2.weight"}, line
    assert "torch.manual_seed(seed + torch.distributed.get_rank())" in line


@two_ranks
def test_equal_rows_are_named_where_real_values_are_initialised_anew() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    fxshard.fully_shard(model)
    for part in model:
        nn.init.xavier_uniform_(part.get_parameter("weight"))
    (line,) = said(model)
    assert "the same rows of 0.weight, 1.weight: " in line


@two_ranks
@pytest.mark.parametrize("around", ["block", "root"])
def test_rows_are_looked_at_out_of_sight_of_selective_checkpointing(around: str) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return recomputed(m.linear, x) if around == "block" else m.linear(x)

    linear = nn.Linear(6, 6)
    model = Doing(forward, linear=linear)
    fxshard.fully_shard(linear)
    fxshard.fully_shard(model)
    nn.init.xavier_uniform_(linear.weight)
    with said_by(initial_rows.__name__) as lines:
        for _ in range(2):
            x = torch.ones(2, 6, requires_grad=True)
            (recomputed(model, x) if around == "root" else model(x)).sum().backward()
    (line,) = lines
    assert "the same rows of linear.weight: " in line


@two_ranks
@pytest.mark.parametrize("values", [seeds, ones, loaded])
def test_nothing_is_said_of_other_values(values: Callable[[nn.Module], None]) -> None:
    model = on_meta()
    values(model)
    assert said(model) == []


@two_ranks
def test_nothing_is_said_of_what_was_initialised_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(torch.arange(6.0).expand(6, 6))  # equal rows are the user's
    fxshard.fully_shard(model)
    assert said(model) == []
