"""What does not fit is named on every rank, and nothing is written; ranks that differ raise, and do not hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxshard
from tests.ranks import two_ranks
from tests.state.helpers import on_first, refused, trained_on_ranks
from tests.state.states import Refuses, adamw, assert_same, net, snapshot, trained

# ---- arguments


@two_ranks
def test_arguments_that_mean_nothing_are_refused() -> None:
    model, optim = trained_on_ranks()
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (fxshard.full_optim_state_dict, (model, optim)),
        (fxshard.full_state_dict, (model,)),
    ]
    for call, args in calls:
        assert "one of the 2 ranks that share the model" in refused(call, *args, recipient_rank=2)
        assert "bucket_mib must be a positive number of MiB, got 0" in refused(call, *args, bucket_mib=0)
    assert 'keys must be "id" or "fqn", got' in refused(fxshard.full_optim_state_dict, model, optim, keys="name")
    other = torch.optim.SGD(net().blocks.parameters(), lr=1.0)
    text = refused(fxshard.full_optim_state_dict, model, other)
    assert "parameters that are not in the model: param_groups[0]['params'][0] of shape [23, 8]" in text


@two_ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_model_or_optimizer_on_one_rank_is_refused_on_both(rank: int) -> None:
    model, optim = trained_on_ranks()
    weights = fxshard.full_state_dict(model)
    state = fxshard.full_optim_state_dict(model, optim)
    wrong = dist.get_rank() == rank
    calls: dict[Callable[..., Any], list[Any]] = {
        fxshard.full_state_dict: [],
        fxshard.load_full_state_dict: [weights],
        fxshard.full_optim_state_dict: [optim],
        fxshard.load_full_optim_state_dict: [optim, state],
    }
    for call, args in calls.items():
        assert f"rank {rank}: model must be an nn.Module, got dict" in refused(call, {} if wrong else model, *args)
        if args[:1] == [optim]:
            text = refused(call, model, None if wrong else optim, *args[1:])
            assert f"rank {rank}: optim must be a torch.optim.Optimizer, got NoneType" in text


# ---- a state that does not fit

Spoil = Callable[[dict[str, Any]], object]

SPOILS: dict[str, tuple[Spoil, str]] = {
    "wrong shape": (
        lambda state: state["state"][2].update(exp_avg=torch.zeros(3, 3)),
        "exp_avg is torch.float32[3, 3], expected torch.float32[",
    ),
    "wrong dtype": (
        lambda state: state["state"][2].update(exp_avg=state["state"][2]["exp_avg"].double()),
        "exp_avg is torch.float64[",
    ),
    "extra key": (
        lambda state: state["state"][2].update(momentum_buffer=torch.zeros(23, 8)),
        "'momentum_buffer', 'step']",
    ),
    "missing key": (
        lambda state: state["state"][2].pop("exp_avg"),
        " has ['exp_avg_sq', 'step'], expected ['exp_avg', 'exp_avg_sq', 'step']",
    ),
    "extra state": (
        lambda state: state["state"].update({99: {"exp_avg": torch.zeros(2)}}),
        "it has state of 99, which no param_group names",
    ),
    "missing group": (lambda state: state["param_groups"].pop(), "the state has param_groups of ["),
    "fewer parameters": (lambda state: state["param_groups"][1]["params"].pop(), "the state has param_groups of ["),
    "no groups": (
        lambda state: state.pop("param_groups"),
        "the state must be a dict with the keys 'state' and 'param_groups'",
    ),
}


@two_ranks
@pytest.mark.parametrize("name", SPOILS)
@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("on_every_rank", [False, True])
def test_a_state_that_does_not_fit_changes_nothing(name: str, is_fresh: bool, on_every_rank: bool) -> None:
    _, reference = trained()
    state, (spoil, message) = reference.state_dict(), SPOILS[name]
    if dist.get_rank() == 0:
        spoil(state)
    model, optim = trained_on_ranks()
    if is_fresh:
        optim = adamw(model)
    before = snapshot(model, optim)
    assert message in refused(fxshard.load_full_optim_state_dict, model, optim, on_first(state, on_every_rank))
    assert_same(snapshot(model, optim), before)


@two_ranks
def test_names_that_do_not_fit_are_listed() -> None:
    model, optim = trained_on_ranks()
    state = fxshard.full_optim_state_dict(model, optim, keys="fqn")
    if dist.get_rank() == 0:
        params = state["param_groups"][1]["params"]
        params[params.index("embedding.weight")] = "tokens.weight"
        state["state"]["tokens.weight"] = state["state"].pop("embedding.weight")
    text = refused(fxshard.load_full_optim_state_dict, model, optim, state)
    assert "its param_groups lack embedding.weight; its param_groups have tokens.weight" in text


@two_ranks
def test_a_sharded_state_is_refused() -> None:
    model, optim = trained_on_ranks()
    assert "is sharded (DTensors): state of " in refused(
        fxshard.load_full_optim_state_dict, model, optim, optim.state_dict()
    )
    assert "is sharded (DTensors): " in refused(fxshard.load_full_state_dict, model, model.state_dict())


@two_ranks
def test_a_state_that_nobody_has_is_refused() -> None:
    model, optim = trained_on_ranks()
    assert "no rank was given a state" in refused(fxshard.load_full_optim_state_dict, model, optim, {})
    assert "no rank was given a state" in refused(fxshard.load_full_state_dict, model, {})


@two_ranks
@pytest.mark.parametrize("on_every_rank", [False, True])
def test_a_model_state_that_does_not_fit_changes_nothing(on_every_rank: bool) -> None:
    model, _ = trained_on_ranks()
    state: dict[str, Any] = dict(net(seed=1).state_dict())
    if dist.get_rank() == 0:
        state["frozen"] = torch.zeros(5, 4)
        state["scale"] = state["scale"].double()
        state["stranger"] = torch.zeros(2)
        state["norm.weight"] = "text"
        del state["one_row"]
    before = snapshot(model)
    text = refused(fxshard.load_full_state_dict, model, on_first(state, on_every_rank))
    for part in (
        "it lacks one_row",
        "it has stranger, which the model does not have",
        "frozen is torch.float32[5, 4], expected torch.float32[5, 3]",
        "scale is torch.float64[], expected torch.float32[]",
        "norm.weight is no tensor",
    ):
        assert part in text
    assert_same(snapshot(model), before)


@two_ranks
@pytest.mark.parametrize("on_every_rank", [False, True])
def test_several_values_for_a_tied_parameter_are_refused(on_every_rank: bool) -> None:
    model, _ = trained_on_ranks()
    state: dict[str, Any] = dict(net(seed=1).state_dict())
    state["head.weight"] = state["head.weight"] + 1
    before = snapshot(model)
    text = refused(fxshard.load_full_state_dict, model, on_first(state, on_every_rank))
    assert "embedding.weight and head.weight are one parameter (tied), and it has different values for them" in text
    assert_same(snapshot(model), before)


@two_ranks
def test_an_extra_state_that_a_module_refuses_on_one_rank_changes_nothing() -> None:
    model = fxshard.fully_shard(nn.Sequential(Refuses(), Refuses()))
    state = fxshard.full_state_dict(model, recipient_rank=None)
    state = {name: value + 1 if isinstance(value, torch.Tensor) else 2 for name, value in state.items()}
    before = {name: value.clone() for name, value in model.named_parameters()}
    state["1._extra_state"] = 3
    text = refused(fxshard.load_full_state_dict, model, on_first(state))
    assert "rank 1: 1._extra_state was not taken by its module (ValueError: no), and nothing was loaded" in text
    assert [module.kept for module in model.children()] == [0, 0]
    assert all(torch.equal(value.to_local(), before[name].to_local()) for name, value in model.named_parameters())  # type: ignore[attr-defined]


@two_ranks
def test_a_buffer_that_cannot_be_written_is_refused() -> None:
    model = fxshard.fully_shard(nn.Linear(4, 4))
    model.register_buffer("mask", torch.zeros(1).expand(4))
    state = fxshard.full_state_dict(model)
    assert "mask cannot be loaded into, for elements share" in refused(fxshard.load_full_state_dict, model, state)


@two_ranks
def test_a_model_on_meta_is_refused() -> None:
    with torch.device("meta"):
        model = net()
    fxshard.fully_shard(model)
    assert "parameters on the meta device have no values: " in refused(fxshard.full_state_dict, model)
    assert "have no values: one_row" in refused(fxshard.load_full_state_dict, model, net().state_dict())
