"""What `fully_shard` refuses; a refusal leaves the module as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from fxshard import fully_shard
from fxshard.errors import ConfigError
from fxshard.sharding.mesh import say_that_one_keeps_all
from fxshard.sharding.sharded_module import units_under
from tests.fake_ranks import fake_ranks
from tests.numerics.harness import compile_module
from tests.numerics.models import MLP, WIDTH
from tests.sharding.untouched import left_as_it_was


def with_parameter(name: str, parameter: nn.Parameter) -> nn.Module:
    model = nn.Module()
    model.inner = nn.Linear(4, 4)
    model.inner.register_parameter(name, parameter)
    return model


def test_refuses_a_module_that_is_sharded_already(mesh: DeviceMesh) -> None:
    model = MLP()
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?i)(twice|already)"):
        fully_shard(model, mesh=mesh)
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?i)(twice|already)"):
        fully_shard(model.blocks[0], mesh=mesh)


def test_refuses_the_result_of_torch_compile(mesh: DeviceMesh) -> None:
    model = MLP()
    compiled = compile_module(model)
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?s)compile.*before|before.*compile"):
        fully_shard(compiled, mesh=mesh)


def test_refuses_a_module_that_was_compiled_in_place(mesh: DeviceMesh) -> None:
    model = MLP()
    model.compile(backend="fxshard")
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?s)compile.*before|before.*compile"):
        fully_shard(model, mesh=mesh)


def test_refuses_a_unit_inside_a_unit_that_is_sharded_already(mesh: DeviceMesh) -> None:
    model = MLP()
    fully_shard(model, mesh=mesh)
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?s)(inner|inside|bottom|first|outer|already)"):
        fully_shard(model.blocks[0], mesh=mesh)


def test_refuses_complex_parameters_by_name(mesh: DeviceMesh) -> None:
    model = with_parameter("phase", nn.Parameter(torch.ones(4, dtype=torch.complex64)))
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?s)complex.*inner\.phase.*ignored_params"):
        fully_shard(model, mesh=mesh)


def test_refuses_sparse_parameters_by_name(mesh: DeviceMesh) -> None:
    model = with_parameter("links", nn.Parameter(torch.eye(4).to_sparse()))
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?s)sparse.*inner\.links.*ignored_params"):
        fully_shard(model, mesh=mesh)


def test_refuses_parameters_of_one_unit_on_two_devices(mesh: DeviceMesh) -> None:
    model = MLP()
    model.head.to("meta")
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?s)(?=.*head\.weight)(?=.*meta)(?=.*cpu)"):
        fully_shard(model, mesh=mesh)


def absent_device_types() -> list[str]:
    available = {"cuda": torch.cuda.is_available(), "xpu": torch.xpu.is_available(), "meta": False}
    return [device_type for device_type, here in available.items() if not here]


@pytest.mark.parametrize("device_type", absent_device_types())
def test_refuses_a_mesh_on_a_device_that_is_not_here(fake_group: None, device_type: str) -> None:
    model = MLP()
    mesh = DeviceMesh(device_type, [0, 1])
    with left_as_it_was(model), pytest.raises(ConfigError, match=f"(?s)mesh.*{device_type}"):
        fully_shard(model, mesh=mesh)


def test_refuses_what_is_no_mesh(fake_group: None) -> None:
    model = MLP()
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?s)mesh.*DeviceMesh"):
        fully_shard(model, mesh=(2,))  # type: ignore[call-overload]


def test_refuses_a_mesh_without_this_rank(fake_group: None) -> None:
    model = MLP()
    mesh = DeviceMesh("cpu", [1])
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"rank \(0\) is not part of the mesh"):
        fully_shard(model, mesh=mesh)


def test_refuses_a_mixed_precision_policy_of_another_kind(mesh: DeviceMesh) -> None:
    model = MLP()
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?s)mp_policy.*MixedPrecisionPolicy"):
        fully_shard(model, mesh=mesh, mp_policy=torch.bfloat16)  # type: ignore[call-overload]


@pytest.mark.parametrize("module", [[], "model", None])
def test_refuses_what_is_no_module(mesh: DeviceMesh, module: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?i)module"):
        fully_shard(module, mesh=mesh)


def test_refuses_a_container_that_has_no_forward(mesh: DeviceMesh) -> None:
    model = MLP()
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?s)ModuleList.*forward"):
        fully_shard(model.blocks, mesh=mesh)


def test_refuses_a_tied_parameter_in_two_units(mesh: DeviceMesh) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    fully_shard(model["a"], mesh=mesh)
    with pytest.raises(ConfigError, match=r"(?s)(?=.*weight)(?=.*(tied|shared))"):
        fully_shard(nn.Sequential(model["a"], model["b"]), mesh=mesh)


@pytest.mark.parametrize("inner_ignores", [True, False])
def test_refuses_a_tied_parameter_that_is_ignored_at_one_of_its_places(mesh: DeviceMesh, inner_ignores: bool) -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    ignored = {cast(nn.Parameter, a.weight)}
    model = nn.Sequential(a, b)
    fully_shard(a, mesh=mesh, ignored_params=ignored if inner_ignores else None)
    with pytest.raises(ConfigError, match=r"(?s)only one place is to be ignored: \S*weight and \S*weight"):
        fully_shard(model, mesh=mesh, ignored_params=None if inner_ignores else ignored)
    if inner_ignores:
        fully_shard(model, mesh=mesh, ignored_params=ignored)
        assert a.weight is b.weight


@pytest.mark.parametrize("policy", ["cpu", True, CPUOffloadPolicy])
def test_refuses_what_is_no_offload_policy(mesh: DeviceMesh, policy: Any) -> None:
    model = MLP()
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"offload_policy must be CPUOffloadPolicy\(\) or"):
        fully_shard(model, mesh=mesh, offload_policy=policy)


def test_says_what_is_wrong_with_the_axes_of_a_mesh(fake_group: None) -> None:
    model = MLP()
    three = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pipeline", "replicate", "shard"))
    with left_as_it_was(model), pytest.raises(ConfigError) as refused:
        fully_shard(model, mesh=three)
    assert str(refused.value).startswith(
        "mesh: expected one axis, which shards, or two, of which the first replicates and the second shards; got 3 axes"
    )
    assert str(refused.value).endswith('Slice them: mesh[name] or mesh["replicate", "shard"].')
    fully_shard(model, mesh=three["replicate", "shard"])
    with pytest.raises(ConfigError, match=r'mesh: two axes need names.*mesh_dim_names=\("replicate", "shard"\)'):
        fully_shard(MLP(), mesh=init_device_mesh("cpu", (1, 2)))


@dataclass(frozen=True)
class Choosing(MixedPrecisionPolicy):
    """torch's policy with a field of torch 2.15."""

    param_dtype_override_fn: Any = None


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("bfloat16", "must return a torch.dtype or None, for blocks.0.norm.weight it returned 'bfloat16'"),
        (torch.float16, r"returned torch.float16 for blocks.0.norm.weight, which is stored in torch.float32"),
    ],
)
def test_names_the_parameter_for_which_a_wrong_dtype_was_chosen(mesh: DeviceMesh, chosen: Any, message: str) -> None:
    model, policy = MLP(), Choosing(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda p: chosen)
    with left_as_it_was(model), pytest.raises(ConfigError, match=message):
        fully_shard(model, mesh=mesh, mp_policy=policy)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("columns", "must return a Shard, .* or None, for blocks.0.norm.weight it returned 'columns'"),
        (Shard(1), r"returned Shard\(dim=1\) for blocks.0.norm.weight, which has shape \[12\]"),
    ],
)
def test_names_the_parameter_with_a_wrong_placement(mesh: DeviceMesh, placement: Any, message: str) -> None:
    model = MLP()
    with left_as_it_was(model), pytest.raises(ConfigError, match=message):
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: placement)


def test_names_the_parameter_whose_columns_do_not_divide_evenly(mesh: DeviceMesh) -> None:
    model = MLP()
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"blocks.0.down.weight of shape \[12, 25\].*2 ranks"):
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(-1) if p.dim() == 2 else None)


@pytest.mark.parametrize("number", [0, -1, 3, 8])
def test_says_which_numbers_of_ranks_may_share_the_parameters(number: int) -> None:
    model = MLP()
    with fake_ranks(4) as mesh, left_as_it_was(model):
        with pytest.raises(ConfigError, match=rf"reshard_after_forward={number}: .* a factor of the 4 that share"):
            fully_shard(model, mesh=mesh, reshard_after_forward=number)


def test_takes_one_rank_for_false_and_all_for_true(caplog: pytest.LogCaptureFixture) -> None:
    say_that_one_keeps_all.cache_clear()
    with fake_ranks(4) as mesh:
        models = [fully_shard(MLP(), mesh=mesh, reshard_after_forward=number) for number in (1, 4, 2)]
    plans = [unit.plan for model in models for unit in units_under(model)]
    assert [(plan.reshard_after_forward, plan.subgroup_size) for plan in plans] == [(False, 0), (True, 0), (True, 2)]
    assert "reshard_after_forward=1 keeps the parameters of a unit on each rank" in caplog.text


@pytest.mark.parametrize("reshard_after_forward", [1.5, "yes"])
def test_refuses_a_reshard_after_forward_of_another_kind(mesh: DeviceMesh, reshard_after_forward: Any) -> None:
    model = MLP()
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?s)reshard_after_forward.*True.*False.*None"):
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)


def test_asks_for_a_process_group_where_a_launcher_announced_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    model = MLP()
    with (
        left_as_it_was(model),
        pytest.raises(ValueError, match=r"(MASTER_ADDR|RANK|init_process_group)"),
    ):
        fully_shard(model)
    assert not dist.is_initialized()


def parametrize(module: nn.Linear) -> None:
    register_parametrization(module, "weight", nn.Identity())


@pytest.mark.parametrize("change", [weight_norm, parametrize])
def test_refuses_to_parametrize_a_sharded_parameter(mesh: DeviceMesh, change: Callable[[nn.Linear], Any]) -> None:
    model = MLP()
    fully_shard(model, mesh=mesh)

    def change_and_call() -> None:
        change(model.head)
        model(torch.ones(1, WIDTH))

    with pytest.raises(ConfigError, match=r"(?s)sharded.*head\.weight\..*parametri.*before fully_shard"):
        change_and_call()


def test_asks_to_initialise_a_model_that_is_still_on_the_meta_device(mesh: DeviceMesh) -> None:
    model = MLP().to("meta")
    fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match=r"(?s)(?=.*head\.weight)(?=.*meta)(?=.*to_empty)"):
        model(torch.ones(1, WIDTH))
