"""Ranks that hold or pass different full states all raise, and none hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

import fxshard
from tests.numerics.harness import world_mesh
from tests.ranks import two_ranks
from tests.state.helpers import refused, trained_on_ranks
from tests.state.states import adamw, assert_same, net, sharded, snapshot, take_steps, two_groups


@two_ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_state_is_named_on_every_rank(rank: int) -> None:
    model, optim = trained_on_ranks()
    if dist.get_rank() == rank:
        optim.state.clear()
    text = refused(fxshard.full_optim_state_dict, model, optim)
    assert "['exp_avg'] torch.float32[23], ['exp_avg_sq'] torch.float32[23] on" in text
    assert f"nothing on rank {rank}" in text
    assert text.startswith("full_optim_state_dict: the ranks do not hold the same state.")


@two_ranks
def test_other_groups_on_one_rank_are_named() -> None:
    model, optim = trained_on_ranks()
    optim.param_groups[1]["lr"] = 0.5 if dist.get_rank() else 0.25
    text = refused(fxshard.full_optim_state_dict, model, optim)
    assert "param_groups[1]['lr']: 0.25 on rank 0, 0.5 on rank 1" in text
    assert "param_groups[0]" not in text


@two_ranks
def test_another_optimizer_on_one_rank_is_named() -> None:
    model = sharded(net())
    optim: Optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    if dist.get_rank():
        optim = torch.optim.AdamW(model.parameters())
    take_steps(model, optim)
    text = refused(fxshard.full_optim_state_dict, model, optim)
    assert "optimizer: SGD on rank 0, AdamW on rank 1" in text
    assert "more)" in text


@two_ranks
@pytest.mark.parametrize("on_every_rank", [False, True])
def test_a_load_into_another_optimizer_on_one_rank_changes_nothing(on_every_rank: bool) -> None:
    model, optim = trained_on_ranks()
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=None if on_every_rank else 0)
    fresh = torch.optim.Adam(two_groups(model)) if dist.get_rank() else adamw(model)
    before = snapshot(model, fresh)
    text = refused(fxshard.load_full_optim_state_dict, model, fresh, state)
    assert "optimizer: AdamW on rank 0, Adam on rank 1" in text
    assert_same(snapshot(model, fresh), before)


@two_ranks
def test_other_arguments_on_one_rank_are_named() -> None:
    model, optim = trained_on_ranks()
    text = refused(fxshard.full_optim_state_dict, model, optim, recipient_rank=dist.get_rank() or None)
    assert "arguments: recipient_rank=None" in text
    assert "recipient_rank=1" in text
    text = refused(fxshard.full_state_dict, model, bucket_mib=1 + dist.get_rank())
    assert "bucket_mib=1 on rank 0" in text


@two_ranks
def test_what_fails_on_one_rank_is_raised_on_both() -> None:
    model, optim = trained_on_ranks()
    if dist.get_rank():
        optim.state_dict = lambda: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    text = refused(fxshard.full_optim_state_dict, model, optim)
    assert "rank 1: ZeroDivisionError" in text


@two_ranks
def test_another_buffer_on_one_rank_is_named() -> None:
    model, _ = trained_on_ranks()
    model.register_buffer("extra", torch.zeros(2 + dist.get_rank()))
    text = refused(fxshard.full_state_dict, model)
    assert "extra: torch.float32[2] whole on rank 0, torch.float32[3] whole on rank 1" in text


@two_ranks
def test_other_buckets_on_one_rank_are_named_before_anything_is_loaded() -> None:
    model, optim = trained_on_ranks()
    weights = fxshard.full_state_dict(model, recipient_rank=None)
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=None)
    for call, args in (
        (fxshard.load_full_state_dict, (model, weights)),
        (fxshard.load_full_optim_state_dict, (model, optim, state)),
    ):
        text = refused(call, *args, bucket_mib=1 + dist.get_rank())
        assert "arguments: bucket_mib=1 on rank 0, bucket_mib=2 on rank 1" in text


@two_ranks
def test_a_state_that_cannot_be_sent_is_refused_on_every_rank() -> None:
    model, optim = trained_on_ranks()
    state = fxshard.full_optim_state_dict(model, optim)
    if state:
        state["param_groups"][0]["schedule"] = lambda step: step
    assert "the state cannot be sent to other ranks" in refused(fxshard.load_full_optim_state_dict, model, optim, state)
    wrong: Any = torch.zeros(2).numpy() if dist.get_rank() else {}
    assert "rank 1: the state must be a dict, got ndarray" in refused(fxshard.load_full_state_dict, model, wrong)


@two_ranks
def test_state_of_parameters_that_are_cut_by_columns_goes_back_where_it_was() -> None:
    model = nn.Linear(4, 4)
    fsdp2_fully_shard(model, mesh=world_mesh(), shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=None)
    average = optim.state[model.weight]["exp_avg"]
    before = average.to_local().clone()
    average.zero_()
    fxshard.load_full_optim_state_dict(model, optim, state)
    after = optim.state[model.weight]["exp_avg"]
    assert after.placements == (Shard(1),)
    assert torch.equal(after.to_local(), before)
    assert before.any()


@two_ranks
def test_an_optimizer_that_refuses_its_state_on_one_rank_raises_on_both() -> None:
    model, optim = trained_on_ranks()
    state = fxshard.full_optim_state_dict(model, optim)
    if dist.get_rank():
        optim.register_load_state_dict_pre_hook(lambda optim, state: state.pop("missing"))
    assert "rank 1: KeyError: 'missing'" in refused(fxshard.load_full_optim_state_dict, model, optim, state)


@two_ranks
def test_strings_in_the_state_stay_as_they_are() -> None:
    model, optim = trained_on_ranks()
    for values in optim.state.values():
        values["mode"] = "warm"
    state = fxshard.full_optim_state_dict(model, optim)
    fxshard.load_full_optim_state_dict(model, optim, state)
    assert {values["mode"] for values in optim.state.values()} == {"warm"}


Change = Callable[[Any], object]

CHANGES: dict[str, tuple[Change, dict[str, Any], list[str]]] = {
    "tensor": (
        lambda kept: kept["step"].add_(1),
        {},
        ["['step'] torch.float32[] whole = 2.0, ", "['step'] torch.float32[] whole = 3.0, "],
    ),
    "text": (
        lambda kept: kept.update(mode="warm"),
        {"nested": {"a": torch.zeros(2), "b": torch.zeros(2)}, "mode": "cold"},
        ["['mode'] 'warm'", "['mode'] 'cold'"],
    ),
    "table": (
        lambda kept: kept.update(table=torch.arange(7) + 1),
        {"table": torch.arange(7)},
        ["['table'] torch.int64[7] whole = CRC-32 "],
    ),
}
"""How a rank changes its state, what is in the state before, and what the error names."""


@two_ranks
@pytest.mark.parametrize("name", CHANGES)
def test_another_value_in_the_state_on_one_rank_is_named(name: str) -> None:
    change, before, named = CHANGES[name]
    model, optim = trained_on_ranks()
    kept = optim.state[model.get_parameter("blocks.0.0.bias")]
    kept.update(before)
    if dist.get_rank():
        change(kept)
    text = refused(fxshard.full_optim_state_dict, model, optim)
    assert "state of blocks.0.0.bias: " in text
    assert "more)" not in text
    for part in named:
        assert part in text


@two_ranks
def test_states_that_differ_between_ranks_are_not_loaded() -> None:
    model, optim = trained_on_ranks()
    before = snapshot(model, optim)
    spoils: dict[str, Change] = {
        "state of blocks.1.2.bias: exp_avg: torch.float32[8] = CRC-32 ": lambda s: s["state"][4]["exp_avg"].add_(1),
        "step: torch.float32[] whole = 2.0 on rank 0, ": lambda s: s["state"][4]["step"].add_(1),
        "param_groups[1]['lr']: 0.02 on rank 0, 0.5 on rank 1": lambda s: s["param_groups"][1].update(lr=0.5),
        "state of blocks.1.2.bias: ['step'] tensor, ": lambda s: s["state"][4].update(step=2),
        "state_dict()['loss_scale']: nothing on rank 0, 8 on rank 1": lambda s: s.update(loss_scale=8),
    }
    for part, spoil in spoils.items():
        state = fxshard.full_optim_state_dict(model, optim, recipient_rank=None)
        if dist.get_rank():
            spoil(state)
        text = refused(fxshard.load_full_optim_state_dict, model, optim, state)
        assert part in text, text
        assert_same(snapshot(model, optim), before)
    weights = fxshard.full_state_dict(model, recipient_rank=None)
    if dist.get_rank():
        weights["frozen"][0, 0] += 1
    text = refused(fxshard.load_full_state_dict, model, weights)
    assert "frozen: torch.float32[5, 3] = CRC-32 " in text
    assert_same(snapshot(model, optim), before)


@two_ranks
def test_each_rank_takes_its_own_buffers_where_every_rank_passes_a_state() -> None:
    model, _ = trained_on_ranks()
    weights = fxshard.full_state_dict(model, recipient_rank=None)
    weights["norm.running_mean"].fill_(dist.get_rank())
    fxshard.load_full_state_dict(model, weights)
    assert model.get_buffer("norm.running_mean").tolist() == [float(dist.get_rank())] * 8
