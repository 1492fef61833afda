"""FSDP2's setters on our modules: what is refused, what only says that it sets nothing, and what reaches the plan."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard.errors import ConfigError
from fxshard.runtime.parameters import REFS
from fxshard.sharding import fsdp2_settings
from fxshard.sharding.sharded_module import units_under


def sharded(mesh: DeviceMesh) -> Any:
    return fxshard.fully_shard(nn.Linear(4, 4), mesh=mesh)


SILENT = {
    "set_unshard_in_backward": False,
    "set_allocate_memory_from_process_group_for_comm": True,
    "set_symm_mem_for_comm": "NCCL",
    "set_reduce_scatter_max_input_buffers": 2,
}


@pytest.mark.parametrize("name", SILENT)
def test_a_setter_without_meaning_says_so_once(mesh: DeviceMesh, name: str, caplog: pytest.LogCaptureFixture) -> None:
    fsdp2_settings.say_once.cache_clear()
    model = sharded(mesh)
    with caplog.at_level(logging.WARNING):
        getattr(model, name)(SILENT[name])
        getattr(model, name)(SILENT[name])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"fxshard: {name} has no meaning here and sets nothing: {fsdp2_settings.MEANINGLESS[name]}."


def test_models_share_streams_without_being_asked(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    fsdp2_settings.say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        fxshard.share_comm_ctx([sharded(mesh), sharded(mesh)])
    assert "share_comm_ctx has no meaning here" in caplog.text


def test_the_name_of_before_sets_the_divisor_and_warns(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    with pytest.warns(DeprecationWarning, match="is now set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(3)
    assert units_under(model)[0].plan.divide_factor == 3.0


def test_an_unshard_that_is_waited_for_later_gives_a_handle(mesh: DeviceMesh) -> None:
    handle = sharded(mesh).unshard(async_op=True)
    assert isinstance(handle, fxshard.UnshardHandle)
    handle.wait()


def test_who_ends_a_step_by_hand_says_so_first_and_of_the_whole_model(mesh: DeviceMesh) -> None:
    model: Any = nn.Sequential(sharded(mesh), nn.Linear(4, 4))
    model[0].set_manual_backward_finalization(True)
    fxshard.fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match="finalize_backward: backwards of this model end their step by themselves"):
        model.finalize_backward()
    with pytest.raises(ConfigError, match=r"set_manual_backward_finalization: 0 is part of a larger model"):
        model[0].set_manual_backward_finalization(True)
    model.set_manual_backward_finalization(True)
    assert model.finalize_backward() is None
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, fxshard.GradientReductionHandle)
    handle.wait()
    model.set_keep_unsharded_storage(False)


def test_unsharded_storage_is_never_kept(mesh: DeviceMesh) -> None:
    with pytest.raises(NotImplementedError, match=r'options={"cudagraphs": True}'):
        sharded(mesh).set_keep_unsharded_storage(True)


def test_a_step_is_not_ended_while_a_backward_runs(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    model.set_manual_backward_finalization(True)
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: model.finalize_backward())
    with pytest.raises(ConfigError, match="finalize_backward was called while a backward runs"):
        x.sum().backward()


def test_a_hook_beside_replicas_has_no_stream_of_its_own(fake_group: None) -> None:
    model = sharded(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(ConfigError, match="a stream is for a mesh of one axis"):
        model.set_all_reduce_hook(print, stream=object())
    with pytest.raises(ConfigError, match=r"stream must be a torch.Stream, got object"):
        sharded(init_device_mesh("cpu", (2,))).set_all_reduce_hook(print, stream=object())


def test_gradient_sync_brings_the_all_reduce_back_as_in_fsdp2(fake_group: None) -> None:
    model = sharded(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    (unit,) = units_under(model)
    model.set_requires_all_reduce(False)
    assert (unit.settings.averages, unit.settings.sync) == (False, True)
    model.set_requires_gradient_sync(True)
    assert unit.settings.averages


def test_settings_of_the_division_are_part_of_what_a_graph_is_compiled_for(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    (unit,) = units_under(model)
    before = unit.plan.sharing_key
    model.set_gradient_divide_factor(3)
    assert unit.plan.sharing_key != before
    model.set_force_sum_reduction_for_comms(True)
    assert (unit.plan.divide_factor, unit.plan.sums_only) == (3.0, True)
    assert unit.plan.sharing_key.count("/3 sums") == 1


def test_a_choice_is_compiled_apart_from_none_for_a_pass_keeps_units_that_nobody_chose_for(mesh: DeviceMesh) -> None:
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
    fxshard.fully_shard(blocks[0], mesh=mesh)
    fxshard.fully_shard(blocks[1], mesh=mesh, reshard_after_forward=False)
    keys = [block.__dict__[REFS]["weight"].key for block in blocks]
    assert [unit.plan.reshard_after_forward for block in blocks for unit in units_under(block)] == [False, False]
    assert keys[0] != keys[1]
    cast(Any, blocks[0]).set_reshard_after_forward(False)
    assert blocks[0].__dict__[REFS]["weight"].key == keys[1]
