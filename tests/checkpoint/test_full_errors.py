"""What does not fit is named on every rank, and nothing is written; ranks that differ raise, and do not hang."""

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
from fxshard import ConfigError
from tests.checkpoint.states import adamw, assert_same, net, sharded, snapshot, take_steps, trained
from tests.numerics.harness import world_mesh
from tests.ranks import two_ranks


def trained_on_ranks() -> tuple[nn.Module, Optimizer]:
    model = sharded(net())
    optim = adamw(model)
    take_steps(model, optim)
    return model, optim


def given(state: Any, on_every_rank: bool) -> Any:
    return state if on_every_rank or dist.get_rank() == 0 else {}


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, str(caught.value))
    assert texts[0] == texts[1]
    return str(caught.value)


# ---- ranks that differ


@two_ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_state_is_named_on_every_rank(rank: int) -> None:
    model, optim = trained_on_ranks()
    if dist.get_rank() == rank:
        optim.state.clear()
    text = refused(fxshard.full_optim_state_dict, model, optim)
    assert "exp_avg: torch.float32[23], exp_avg_sq: torch.float32[23]} on" in text
    assert f"nothing on rank {rank}" in text
    assert text.startswith("full_optim_state_dict: the ranks do not hold the same state.")


@two_ranks
def test_other_groups_on_one_rank_are_named() -> None:
    model, optim = trained_on_ranks()
    optim.param_groups[1]["lr"] = 0.5 if dist.get_rank() else 0.25
    text = refused(fxshard.full_optim_state_dict, model, optim)
    assert "param_groups[1]: {lr: 0.25" in text
    assert "{lr: 0.5" in text
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
        assert "bucket_mib differs between ranks: 1 on rank 0, 2 on rank 1" in text


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
def test_state_of_parameters_that_are_cut_by_columns_is_refused() -> None:
    model = nn.Linear(4, 4)
    fsdp2_fully_shard(model, mesh=world_mesh(), shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=None)
    text = refused(fxshard.load_full_optim_state_dict, model, optim, state)
    assert "weight is not sharded by rows on a 1-D mesh, but S(1)" in text


@two_ranks
def test_strings_in_the_state_stay_as_they_are() -> None:
    model, optim = trained_on_ranks()
    for values in optim.state.values():
        values["mode"] = "warm"
    state = fxshard.full_optim_state_dict(model, optim)
    fxshard.load_full_optim_state_dict(model, optim, state)
    assert {values["mode"] for values in optim.state.values()} == {"warm"}


Change = Callable[[Any], object]


def _another_tensor(kept: Any) -> None:
    kept["step"] += 1


def _another_number(kept: Any) -> None:
    kept.update(nested={"a": torch.zeros(2), "b": torch.zeros(2)}, mode="warm")


def _another_table(kept: Any) -> None:
    kept["table"] = torch.arange(7) + 1


CHANGES: dict[Change, list[str]] = {
    _another_tensor: ["{step: torch.float32[] whole = 2.0, ", "{step: torch.float32[] whole = 3.0, "],
    _another_number: ["mode: warm", "mode: cold"],
    _another_table: ["table: torch.int64[7] whole = CRC-32 "],
}


@two_ranks
@pytest.mark.parametrize("change", list(CHANGES))
def test_another_value_in_the_state_on_one_rank_is_named(change: Change) -> None:
    model, optim = trained_on_ranks()
    kept = optim.state[model.get_parameter("blocks.0.0.bias")]
    if change is not _another_tensor:
        change(kept)
        kept.update({"mode": "cold"} if "mode" in kept else {"table": torch.arange(7)})
    if dist.get_rank():
        change(kept)
    text = refused(fxshard.full_optim_state_dict, model, optim)
    assert "state of blocks.0.0.bias: " in text
    assert "more)" not in text
    for part in CHANGES[change]:
        assert part in text


@two_ranks
def test_states_that_differ_between_ranks_are_not_loaded() -> None:
    model, optim = trained_on_ranks()
    before = snapshot(model, optim)
    spoils: dict[str, Change] = {
        "state of blocks.1.2.bias: exp_avg: torch.float32[8] = CRC-32 ": lambda s: s["state"][4]["exp_avg"].add_(1),
        "step: torch.float32[] whole = 2.0 on rank 0, ": lambda s: s["state"][4]["step"].add_(1),
        "param_groups[1]: {lr: 0.02": lambda s: s["param_groups"][1].update(lr=0.5),
        "state of blocks.1.2.bias: {step: tensor, ": lambda s: s["state"][4].update(step=2),
        "other keys: {} on rank 0, {loss_scale: 8} on rank 1": lambda s: s.update(loss_scale=8),
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


def _wrong_shape(state: dict[str, Any]) -> None:
    state["state"][2]["exp_avg"] = torch.zeros(3, 3)


def _wrong_dtype(state: dict[str, Any]) -> None:
    state["state"][2]["exp_avg"] = state["state"][2]["exp_avg"].double()


def _extra_key(state: dict[str, Any]) -> None:
    state["state"][2]["momentum_buffer"] = torch.zeros(23, 8)


def _extra_state(state: dict[str, Any]) -> None:
    state["state"][99] = {"exp_avg": torch.zeros(2)}


def _missing_group(state: dict[str, Any]) -> None:
    state["param_groups"].pop()


def _fewer_parameters(state: dict[str, Any]) -> None:
    state["param_groups"][1]["params"].pop()


def _no_groups(state: dict[str, Any]) -> None:
    del state["param_groups"]


SPOILS: dict[Spoil, str] = {
    _wrong_shape: "exp_avg is torch.float32[3, 3], expected torch.float32[",
    _wrong_dtype: "exp_avg is torch.float64[",
    _extra_key: "'momentum_buffer', 'step'], expected [",
    _extra_state: "it has state of 99, which no param_group names",
    _missing_group: "the state has param_groups of [",
    _fewer_parameters: "the state has param_groups of [",
    _no_groups: "the state must be a dict with the keys 'state' and 'param_groups'",
}


@two_ranks
@pytest.mark.parametrize("spoil", list(SPOILS))
@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("on_every_rank", [False, True])
def test_a_state_that_does_not_fit_changes_nothing(spoil: Spoil, is_fresh: bool, on_every_rank: bool) -> None:
    _, reference = trained()
    state = reference.state_dict()
    if dist.get_rank() == 0:
        spoil(state)
    model, optim = trained_on_ranks()
    if is_fresh:
        optim = adamw(model)
    if is_fresh and spoil is _extra_key:
        return  # nothing says that it is wrong
    before = snapshot(model, optim)
    text = refused(
        fxshard.load_full_optim_state_dict, model, optim, state if on_every_rank or dist.get_rank() == 0 else {}
    )
    assert SPOILS[spoil] in text
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
    text = refused(fxshard.load_full_state_dict, model, given(state, on_every_rank))
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
def test_a_model_on_meta_is_refused() -> None:
    with torch.device("meta"):
        model = net()
    fxshard.fully_shard(model)
    assert "parameters on the meta device have no values: " in refused(fxshard.full_state_dict, model)
    assert "have no values: one_row" in refused(fxshard.load_full_state_dict, model, net().state_dict())
