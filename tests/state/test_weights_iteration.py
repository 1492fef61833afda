"""An iteration over the weights ends on every rank, also where ranks read at their own pace or leave early."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from fxshard.errors import ConfigError, RankMismatchError
from tests.ranks import fresh_ranks, two_ranks
from tests.state.states import adamw, assert_same, net, sharded, take_steps

BUCKET_MIB = 0.25
LAYERS = 12


def stack() -> Any:
    """Return a model of a bucket per layer."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(200, 200) for _ in range(LAYERS)))


def weights_of(model: nn.Module, ranks: Any = None) -> fxshard.FullWeights:
    return fxshard.full_weights(model, bucket_mib=BUCKET_MIB, ranks=ranks)


def still_in_step(model: nn.Module) -> None:
    """A later iteration gives every rank what it should."""
    assert_same({name: w.clone() for name, w in weights_of(model)}, dict(stack().state_dict()))


@two_ranks
@pytest.mark.parametrize("at", [0, 7, 2 * LAYERS - 1])
@pytest.mark.parametrize("leaving", [(0,), (0, 1)])
def test_a_rank_may_break_and_the_others_read_on(leaving: tuple[int, ...], at: int) -> None:
    model = fxshard.fully_shard(stack())
    found = {}
    for i, (name, weight) in enumerate(weights_of(model)):
        found[name] = weight.clone()
        if dist.get_rank() in leaving and i == at:
            break
    assert len(found) == (at + 1 if dist.get_rank() in leaving else 2 * LAYERS)
    assert_same(found, {name: stack().state_dict()[name] for name in found})
    still_in_step(model)


@two_ranks
@pytest.mark.parametrize("ranks", [None, 0])
def test_an_error_in_the_loop_is_that_ranks_own(ranks: int | None) -> None:
    model = fxshard.fully_shard(stack())

    def update() -> None:
        for i, _ in enumerate(weights_of(model, ranks)):
            if dist.get_rank() == 0 and i == 5:
                raise KeyError("engine")

    with pytest.raises(KeyError) if dist.get_rank() == 0 else contextlib.nullcontext():
        update()
    still_in_step(model)


@two_ranks
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_ranks_may_read_at_their_own_pace(slow_rank: int) -> None:
    model = fxshard.fully_shard(stack())
    found = {}
    for name, weight in weights_of(model):
        if dist.get_rank() == slow_rank:
            time.sleep(0.01)
        found[name] = weight.clone()
    assert_same(found, dict(stack().state_dict()))


@two_ranks
def test_with_closes_it_and_closing_twice_is_fine() -> None:
    model = fxshard.fully_shard(stack())
    with weights_of(model) as weights:
        next(weights)
        if dist.get_rank() == 0:
            weights.close()
            assert list(weights) == []
        else:
            assert len(list(weights)) == 2 * LAYERS - 1
    assert list(weights.buckets()) == []
    still_in_step(model)


@two_ranks
@pytest.mark.parametrize("how", ["close", "with", "drop", "drop buckets"])
def test_a_rank_may_close_it_before_it_begins(how: str) -> None:
    model = fxshard.fully_shard(stack())
    weights: Any = weights_of(model)
    if dist.get_rank() == 0:
        assert len(list(weights)) == 2 * LAYERS
    elif how == "close":
        weights.close()
    elif how == "with":
        with weights:
            pass
    elif how == "drop buckets":
        weights = weights.buckets()
    del weights
    still_in_step(model)


@two_ranks
def test_parameters_that_change_during_a_pass_are_an_error() -> None:
    model = sharded(net())
    optim = adamw(model)
    take_steps(model, optim)

    def update() -> None:
        for _ in fxshard.full_weights(model, bucket_mib=0.0005):
            optim.step()

    with pytest.raises(ConfigError, match="parameters were changed during the iteration"):
        update()
    fxshard.full_state_dict(model)


@fresh_ranks
def test_a_rank_that_leaves_its_iterator_open_is_named() -> None:
    """It goes on to a forward, which gathers parameters, while the other one waits for weights."""
    model: Any = fxshard.fully_shard(stack())
    weights = weights_of(model)

    def update() -> None:
        for i, _ in enumerate(weights):
            if dist.get_rank() == 0 and i == 3:
                model(torch.ones(1, 200))

    with pytest.raises(RankMismatchError, match="whole weights"):
        update()
    dist.destroy_process_group()


@fresh_ranks
def test_a_rank_that_never_asks_is_named() -> None:
    model: Any = fxshard.fully_shard(stack())
    with pytest.raises(RankMismatchError, match="whole weights"):
        _ = model(torch.ones(1, 200)) if dist.get_rank() == 0 else weights_of(model)
    dist.destroy_process_group()
