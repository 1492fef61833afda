"""Offloaded units: what goes to the host with them, what is said where nothing does, and what they refuse."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.compile.one_line import first_call
from fxshard.compile.one_line.units import offloaded_of
from fxshard.errors import ConfigError
from fxshard.options import Options
from fxshard.sharding.sharded_module import units_under
from tests.numerics.harness import compile_module

ON_HOST = CPUOffloadPolicy(pin_memory=False)


@pytest.mark.parametrize("fused", [False, True])
def test_the_state_of_an_optimizer_goes_where_its_parameter_goes(mesh: DeviceMesh, fused: bool) -> None:
    """In place of two devices: the parameter goes from the CPU to the meta device."""
    old = nn.Parameter(torch.ones(4, 2))
    optim = torch.optim.AdamW([old], fused=fused)
    old.grad = torch.ones(4, 2)
    optim.step()
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.empty(4, 2, device="meta")))
    fxshard.fully_shard(module, mesh=mesh)
    new = cast(nn.Parameter, module.weight)
    first_call.rebind_optimizers({id(old): (old, new)})
    (group,), state = optim.param_groups, optim.state[new]
    assert group["params"] == [new]
    assert old not in optim.state
    assert {name: state[name].device.type for name in ("exp_avg", "exp_avg_sq")} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq"), "meta"
    )
    assert cast(DTensor, state["exp_avg"]).to_local().shape == (2, 2)
    assert state["step"].device.type == ("meta" if fused else "cpu")


@pytest.mark.parametrize(("part", "expected"), [(0, 0), (0.1, 0), (0.25, 1), (0.5, 2), (1, 4)])
def test_says_so_where_no_unit_fits(part: float, expected: int, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    *blocks, root = model
    in_turn = [*reversed(blocks), root]
    with caplog.at_level(logging.WARNING):
        assert offloaded_of([*blocks, root], Options(offload={"params": part})) == {*in_turn[:expected]}
    said = "nothing is offloaded: whole units are, the last one first, and it has 0.25 of the bytes"
    assert (said in caplog.text) == (part == 0.1)


def test_one_rank_says_that_it_offloads_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = compile_module(nn.Linear(4, 4), options={"lower": "eager", "offload": {"params": 1}})
    with caplog.at_level(logging.WARNING):
        model(torch.ones(2, 4))
    assert "Nothing is offloaded: for that call fully_shard(..., offload_policy=...)" in caplog.text


def test_refuses_a_hook_of_gradients_that_come_in_no_order(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = fxshard.fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy=ON_HOST)
    model.set_all_reduce_hook(print)  # a CPU has one thread for all of a backward
    monkeypatch.setattr(DeviceMesh, "device_type", "cuda")
    with pytest.raises(ConfigError, match="set_all_reduce_hook: unit 'root' is offloaded"):
        model.set_all_reduce_hook(print)


def test_adopts_no_hook_of_gradients_that_come_in_no_order(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Linear(4, 4)
    fsdp2_fully_shard(model, mesh=mesh, offload_policy=ON_HOST)
    model.set_all_reduce_hook(print)
    monkeypatch.setattr(DeviceMesh, "device_type", "cuda")
    with pytest.raises(ConfigError, match="the root: set_all_reduce_hook of offloaded parameters"):
        fxshard.adopt(model)


def test_refuses_shards_that_were_moved_off_the_host(mesh: DeviceMesh) -> None:
    """In place of two devices: what a unit on the host is told of a flat that is elsewhere."""
    model: nn.Module = nn.Linear(4, 4)
    fxshard.fully_shard(model, mesh=mesh, offload_policy=ON_HOST)
    model.to_empty(device="cpu")
    (unit,) = units_under(model)
    moved: Any = SimpleNamespace(is_meta=False, device=torch.device("cuda", 0))
    unit.shards[0].flat = moved
    with pytest.raises(ConfigError, match=r"offloaded \(offload_policy\), but on cuda:0: weight, bias. Leave them on"):
        unit.check()
