"""What a checkpoint holds: state of modules, of every optimizer, and what was added; each comes back as it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

import fxshard
from fxshard.errors import CheckpointError, ConfigError
from tests.numerics.models import MLP
from tests.ranks import two_ranks
from tests.state.bodies import build, state_of, train
from tests.state.helpers import load_saved, shared_folder
from tests.state.states import Keeps, assert_same

DICTS: list[dict[Any, Any]] = [{}, {1: 2}, {"a": {}, "b": [{}, {(1, 2): torch.ones(2)}], "c": ({},)}]


@pytest.mark.parametrize("kept", DICTS, ids=["empty", "numbers", "nested"])
def test_dicts_without_keys_or_with_keys_of_any_kind_come_back(kept: dict[Any, Any], tmp_path: Path) -> None:
    model, other = Keeps(kept), Keeps(None)
    optim, other_optim = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    optim.param_groups[0]["kept"] = kept
    optim.state[model.weight] = {"kept": kept, "x": torch.ones(2)}
    fxshard.save_checkpoint(tmp_path / "a", model, optim)
    fxshard.load_checkpoint(tmp_path / "a", other, other_optim)
    for found in (other.kept, other_optim.param_groups[0]["kept"], other_optim.state[other.weight]["kept"]):
        assert_same(found, kept)


@pytest.mark.parametrize("former", [torch.zeros(0), torch.zeros(2, dtype=torch.int64), "none yet"], ids=str)
def test_an_extra_state_that_is_a_tensor_may_have_any_shape(former: Any, tmp_path: Path) -> None:
    model, other = Keeps(torch.arange(7.0)), Keeps(former)
    fxshard.save_checkpoint(tmp_path / "a", model)
    fxshard.load_checkpoint(tmp_path / "a", other)
    assert_same(other.kept, model.kept)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.1), amsgrad=True, foreach=False),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "radam": lambda ps: torch.optim.RAdam(ps),
    "numpy": lambda ps: torch.optim.SGD(ps, lr=0.5, weight_decay=np.float64(0.1)),
}


@two_ranks
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_comes_back(name: str) -> None:
    model, _ = build()
    optim = OPTIMIZERS[name](model.parameters())
    train(model, optim, range(2))
    expected = state_of(model, optim)
    for group in expected["groups"]:
        group["weight_decay"] = group["weight_decay"] if name != "numpy" else 0.1
    other, _ = build(seed=1)
    other_optim = OPTIMIZERS[name](other.parameters())
    load_saved((model, optim), (other, other_optim))
    assert_same(state_of(other, other_optim), expected)
    assert train(other, other_optim, range(2, 4)) == train(model, optim, range(2, 4))


class WithScale(torch.optim.AdamW):
    """Keeps more than state and groups in its state_dict."""

    scale, steps = 8.0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loss_scale": self.scale, "scaler": {"steps": self.steps, "empty": {}}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["loss_scale"] < 0:
            raise ValueError("negative scale")
        self.scale, self.steps = state_dict["loss_scale"], state_dict["scaler"]["steps"]
        super().load_state_dict(state_dict)


def trained(scale: float) -> tuple[nn.Module, WithScale]:
    """Return a model and an optimizer whose moments have another dtype than the parameters."""
    model, _ = build(dtype=torch.bfloat16)
    optim = WithScale(model.parameters(), lr=0.1)
    train(model, optim, range(2))
    for state in optim.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-5
    optim.scale, optim.steps = scale, torch.ones(2)
    return model, optim


@two_ranks
def test_what_an_optimizer_adds_to_its_state_dict_comes_back() -> None:
    model, optim = trained(4.0)
    expected = state_of(model, optim)
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim)
        for loaded in (optim, WithScale(model.parameters(), lr=0.2)):
            loaded.scale = 8.0
            fxshard.load_checkpoint(folder / "a", model, loaded)
            assert loaded.scale == 4.0
            assert torch.equal(loaded.steps, torch.ones(2))
            assert_same(state_of(model, loaded), expected)


@two_ranks
def test_what_an_optimizer_does_not_take_leaves_all_as_it_was() -> None:
    model, optim = trained(-1.0)
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        optim.scale = 2.0
        before = state_of(model, optim)
        with pytest.raises(ConfigError, match=r"WithScale.load_state_dict does not take .*\['loss_scale', 'scaler'\]"):
            fxshard.load_checkpoint(folder / "a", model, optim)
        assert optim.scale == 2.0
        assert_same(state_of(model, optim), before)


@two_ranks
def test_what_an_optimizer_with_state_adds_must_be_there_on_both_sides() -> None:
    model, optim = trained(4.0)
    with shared_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(WithScale, "state_dict", torch.optim.AdamW.state_dict)
        fxshard.save_checkpoint(folder / "a", model, optim)
        patch.undo()
        with pytest.raises(CheckpointError, match=r"adds nothing there, and \['loss_scale', 'scaler'\] here"):
            fxshard.load_checkpoint(folder / "a", model, optim)


@two_ranks
def test_state_keeps_its_dtype() -> None:
    model, _ = build(dtype=torch.bfloat16)
    optim = torch.optim.SGD(model.parameters())
    for p in model.parameters():
        optim.state[p] = {"master": p.detach().float() / 3, "nested": {"history": [p.detach().clone(), 2, "text"]}}
    expected = state_of(model, optim)
    other, _ = build(seed=1, dtype=torch.bfloat16)
    other_optim = torch.optim.SGD(other.parameters())
    load_saved((model, optim), (other, other_optim))
    assert_same(state_of(other, other_optim), expected)


@two_ranks
def test_state_of_another_shape_than_its_parameter_keeps_its_placement() -> None:
    model, _ = build()
    optim = torch.optim.SGD(model.parameters())
    for p in model.parameters():
        mesh = p.device_mesh  # type: ignore[attr-defined]
        optim.state[p] = {
            "rows": distribute_tensor(torch.randn(5, 2), mesh, [Shard(0)]),
            "all": distribute_tensor(torch.randn(3), mesh, [Replicate()]),
        }
    expected = state_of(model, optim)
    other, _ = build(seed=1)
    other_optim = torch.optim.SGD(other.parameters())
    load_saved((model, optim), (other, other_optim))
    assert_same(state_of(other, other_optim), expected)
    for state in other_optim.state.values():
        assert [state["rows"].placements, state["all"].placements] == [(Shard(0),), (Replicate(),)]


@two_ranks
def test_a_counter_of_one_element_stays_plain_where_its_parameter_has_one_too() -> None:
    def made() -> tuple[nn.Module, Optimizer]:
        model = nn.Module()
        model.gate = nn.Parameter(torch.ones(1))
        fxshard.fully_shard(model)
        return model, torch.optim.SGD(model.parameters())

    model, optim = made()
    (gate,) = model.parameters()
    optim.state[gate] = {"count": torch.full((1,), 3.0), "moment": torch.zeros_like(gate)}
    other, fresh = made()
    load_saved((model, optim), (other, fresh))
    (state,) = fresh.state.values()
    assert type(state["count"]) is Tensor
    assert state["count"].tolist() == [3.0]
    assert isinstance(state["moment"], DTensor)


def test_extra_comes_back_with_its_types(tmp_path: Path) -> None:
    extra = {
        "numbers": [1, 2.5, True, None, 1j, float("inf")],
        7: ("text", b"bytes", torch.bfloat16, torch.device("cpu"), torch.Size([2])),
        "tensors": {"view": torch.arange(100)[3:5], "parameter": nn.Parameter(torch.ones(2))},
        "ordered": OrderedDict(b=1, a={2, 3}),
        "numpy": np.float32(0.5),
    }
    fxshard.save_checkpoint(tmp_path / "a", MLP(), extra=extra)
    assert (tmp_path / "a" / "extra.pt").stat().st_size < 5000  # not the storage behind the view
    found = fxshard.load_checkpoint(tmp_path / "a", MLP())
    extra["numpy"] = 0.5
    assert torch.equal(found["tensors"].pop("view"), extra["tensors"].pop("view"))  # type: ignore[attr-defined]
    assert torch.equal(found["tensors"].pop("parameter"), torch.ones(2))
    extra["tensors"] = {}
    assert found == extra


def test_a_conjugated_view_comes_back_as_its_values(tmp_path: Path) -> None:
    view = torch.tensor([1 + 2j]).conj()
    model = nn.Linear(2, 2)
    model.register_buffer("view", view)
    fxshard.save_checkpoint(tmp_path / "a", model, extra=view)
    model.get_buffer("view").zero_()
    assert fxshard.load_checkpoint(tmp_path / "a", model).tolist() == [1 - 2j]
    assert model.get_buffer("view").tolist() == [1 - 2j]


def test_a_scheduler_comes_back(tmp_path: Path) -> None:
    model, optim = build("mlp", "unsharded")
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optim, [1, 3])
    train(model, optim, range(1))
    scheduler.step()
    fxshard.save_checkpoint(tmp_path / "a", model, optim, extra=scheduler.state_dict())
    other, other_optim = build("mlp", "unsharded", seed=1)
    extra = fxshard.load_checkpoint(tmp_path / "a", other, other_optim)
    again = torch.optim.lr_scheduler.MultiStepLR(other_optim, [1, 3])
    again.load_state_dict(extra)
    assert again.state_dict() == scheduler.state_dict()
    assert_same(state_of(other, other_optim), state_of(model, optim))


@two_ranks
def test_buffers_are_those_of_rank_0() -> None:
    model = fxshard.fully_shard(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
    statistics = model.get_buffer("0.running_mean"), model.get_buffer("0.running_var")
    for buffer in statistics:
        buffer.fill_(dist.get_rank() + 1)
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model)
        fxshard.load_checkpoint(folder / "a", model)
    assert [buffer.tolist() for buffer in statistics] == [[1.0] * 4] * 2
