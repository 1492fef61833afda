"""The full state of a sharded model is that of the unsharded module, and a load that cannot be done writes nothing."""

from __future__ import annotations

import copy
import functools
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import CheckpointError, ConfigError
from tests.numerics.harness import EAGER
from tests.ranks import two_ranks
from tests.state.helpers import on_first, require_refusal, shared_folder
from tests.state.processes import start
from tests.state.states import (
    Keeps,
    Refuses,
    adamw,
    assert_same,
    net,
    sharded,
    take_steps,
    take_steps_of_all,
)


@two_ranks
@pytest.mark.parametrize("recipient", [0, 1, None])
def test_is_the_state_dict_of_the_unsharded_module(recipient: int | None) -> None:
    plain = net()
    state = fxshard.full_state_dict(sharded(net()), recipient_rank=recipient)
    if recipient not in (None, dist.get_rank()):
        assert state == {}
        return
    assert_same(state, plain.state_dict())
    assert state["head.weight"] is state["embedding.weight"]
    assert vars(state)["_metadata"] == vars(plain.state_dict())["_metadata"]
    net(seed=1).load_state_dict(state)


@two_ranks
@pytest.mark.parametrize("on_every_rank", [False, True])
def test_a_checkpoint_of_the_unsharded_module_loads(on_every_rank: bool) -> None:
    plain = net(seed=1)
    plain.norm.running_mean += torch.arange(8)
    model = sharded(net())
    take_steps(model, adamw(model))
    state = plain.state_dict()
    fxshard.load_full_state_dict(model, on_first(state, on_every_rank))
    assert_same(fxshard.full_state_dict(model), on_first(plain.state_dict()))
    tokens = torch.arange(6)
    assert model.eval()(tokens).equal(plain.eval()(tokens))


@two_ranks
def test_a_gather_of_the_old_values_is_not_used() -> None:
    model: Any = sharded(net())
    plain = net(seed=1)
    tokens = torch.arange(6)
    compiled: Any = torch.compile(model.eval(), backend="fxshard", options=EAGER)
    compiled(tokens)
    model.unshard()
    fxshard.load_full_state_dict(compiled, on_first(plain.state_dict()))
    with pytest.raises(fxshard.UnsupportedGraph, match="were changed after their gather was launched"):
        compiled(tokens)
    model.reset_iter_state()
    assert torch.allclose(compiled(tokens), plain.eval()(tokens))


@two_ranks
def test_names_are_those_without_compile() -> None:
    model = sharded(net())
    model.blocks[0] = torch.compile(model.blocks[0], backend="fxshard")
    state = fxshard.full_state_dict(model)
    assert_same(state, on_first(net().state_dict()))
    fxshard.load_full_state_dict(model, on_first(net(seed=1).state_dict()))
    assert_same(fxshard.full_state_dict(model), on_first(net(seed=1).state_dict()))


@two_ranks
@pytest.mark.parametrize("extra", [{"seen": [1, 2]}, torch.arange(3)], ids=["dict", "tensor"])
def test_extra_state_travels(extra: dict[str, Any] | Tensor) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Keeps(extra), nn.BatchNorm1d(2))
    expected = model.state_dict()
    fxshard.fully_shard(model)
    state = fxshard.full_state_dict(model)
    assert_same(state, on_first(expected))
    model[0].kept = torch.zeros(0) if isinstance(extra, Tensor) else None
    fxshard.load_full_state_dict(model, state)
    assert_same(model[0].kept, extra)


@two_ranks
def test_mixed_dtypes_and_buffers_that_are_not_contiguous() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Module()
        dtypes = torch.float32, torch.bfloat16, torch.float64, torch.float16
        model.weights = nn.ParameterList(nn.Parameter(torch.randn(3 + i, 5).to(d)) for i, d in enumerate(dtypes))
        model.register_buffer("grid", torch.arange(12.0).view(3, 4).t())
        model.register_buffer("mask", torch.tensor([True, False]))
        model.register_buffer("empty", torch.zeros(0, 4))
        return model

    model, plain = build(), build()
    fxshard.fully_shard(model, mesh=None)
    before = fxshard.full_state_dict(model)
    assert_same(before, on_first(plain.state_dict()))
    for p in [*model.parameters(), *model.buffers()]:
        p.detach().zero_()
    fxshard.load_full_state_dict(model, before)
    assert_same(fxshard.full_state_dict(model), before)


@two_ranks
@pytest.mark.parametrize("is_ours", [False, True])
def test_what_one_of_fsdp2_and_fxshard_trained_the_other_takes(is_ours: bool) -> None:
    shard, other = (fxshard.fully_shard, torch_fully_shard) if is_ours else (torch_fully_shard, fxshard.fully_shard)
    mesh = init_device_mesh("cpu", (2,))
    trained, taking = net(), net(seed=1)
    for model in (trained, taking):
        model.scale = nn.Parameter(torch.tensor([1.5]))  # FSDP2 takes no scalars
    shard(trained, mesh=mesh)
    other(taking, mesh=mesh)
    optims = adamw(trained), adamw(taking)
    take_steps(trained, optims[0])
    fxshard.load_full_state_dict(taking, fxshard.full_state_dict(trained))
    fxshard.load_full_optim_state_dict(taking, optims[1], fxshard.full_optim_state_dict(trained, optims[0]))
    take_steps(trained, optims[0], first=2)
    take_steps(taking, optims[1], first=2)
    assert_same(fxshard.full_state_dict(taking), fxshard.full_state_dict(trained))
    found, expected = (
        fxshard.full_optim_state_dict(taking, optims[1]),
        fxshard.full_optim_state_dict(trained, optims[0]),
    )
    assert_same(found, expected)


@two_ranks
@pytest.mark.parametrize("is_compiled", [False, True])
def test_training_goes_on_on_another_number_of_ranks(is_compiled: bool) -> None:
    model: Any = sharded(net().double())
    optim = adamw(model)
    called: Any = torch.compile(model, backend="fxshard", options=EAGER) if is_compiled else model
    take_steps(called, optim, steps=5)
    weights = fxshard.full_state_dict(called, recipient_rank=None)
    state = fxshard.full_optim_state_dict(called, optim, recipient_rank=None)
    take_steps(called, optim, steps=5, first=5)
    plain = net(seed=1).double()
    alone = adamw(plain)
    fxshard.load_full_state_dict(plain, weights)
    fxshard.load_full_optim_state_dict(plain, alone, state)
    take_steps_of_all(plain, alone, steps=5, first=5)
    final = fxshard.full_state_dict(called, recipient_rank=None)
    for name, value in plain.state_dict().items():
        if not name.startswith("norm."):  # each rank normalises its own batch
            torch.testing.assert_close(final[name], value, rtol=1e-6, atol=1e-9)


def test_works_on_one_rank_without_a_process_group() -> None:
    model = net()
    state = fxshard.full_state_dict(model)
    assert_same(state, model.state_dict())
    other = net(seed=1)
    fxshard.load_full_state_dict(other, state)
    assert_same(other.state_dict(), model.state_dict())


@two_ranks
def test_an_extra_state_that_a_module_refuses_changes_nothing() -> None:
    model, other = (nn.Sequential(Refuses(first), Refuses(second)) for first, second in ((2, 3), (0, 0)))
    fxshard.fully_shard(model)
    fxshard.fully_shard(other)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim)
        message = "rank 1: 1._extra_state was not taken by its module (ValueError: no), and nothing was loaded"
        require_refusal(folder / "a", other, torch.optim.AdamW(other.parameters()), ConfigError, message)
    assert [cast(Refuses, module).kept for module in other] == [0, 0]


def test_a_buffer_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(1).expand(4))
    fxshard.save_checkpoint(tmp_path / "a", model)
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.weight)
    require_refusal(tmp_path / "a", other, None, ConfigError, "mask cannot be loaded into, for elements share memory")


def test_a_buffer_that_was_made_in_inference_mode_is_refused(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(4))
    with torch.inference_mode():
        other.register_buffer("mask", torch.ones(4))
    fxshard.save_checkpoint(tmp_path / "a", model)
    require_refusal(tmp_path / "a", other, None, ConfigError, "mask cannot be loaded into, for", "in inference mode")
    with torch.inference_mode():
        fxshard.load_checkpoint(tmp_path / "a", other)
        assert other.get_buffer("mask").tolist() == [0.0] * 4


def lose_a_rank_in_the_commit(folder: str) -> tuple[int, str, bool]:
    model, other = fxshard.fully_shard(Keeps(7)), fxshard.fully_shard(Keeps(0))
    fxshard.save_checkpoint(folder, model)
    if dist.get_rank() == 1:
        die = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        other.register_load_state_dict_pre_hook(lambda *_: die())  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError) as caught:
        fxshard.load_checkpoint(folder, other)
    rows = (cast(DTensor, each.weight).to_local() for each in (model, other))
    return other.kept, str(caught.value), torch.equal(*rows)


def test_a_rank_that_is_lost_while_the_model_is_written_leaves_its_extra_state(tmp_path: Path) -> None:
    ends = start(2, lose_a_rank_in_the_commit, str(tmp_path / "a"))
    assert ends[1].killed
    kept, message, is_new = ends[0].result
    assert "the ranks have lost each other" in message
    assert (kept, is_new) == (7, True)


class Renames(nn.Module):
    """Has another name for its weight in its state_dict; knows it again or not."""

    def __init__(self, *, both_ways: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda _, state, *__: state.update(old=state.pop("linear.weight"))
        )
        if both_ways:
            self.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                lambda _, state, *__: state.update({"linear.weight": state.pop("old")})
            )


def test_a_tensor_that_a_hook_renames_is_loaded_or_missed(tmp_path: Path) -> None:
    model, other, third = (Renames(both_ways=each) for each in (True, True, False))
    fxshard.save_checkpoint(tmp_path / "a", model)
    fxshard.load_checkpoint(tmp_path / "a", other)
    assert torch.equal(other.linear.weight, model.linear.weight)
    with pytest.raises(CheckpointError, match="load_state_dict of the model has no place for old, though"):
        fxshard.load_checkpoint(tmp_path / "a", third)
