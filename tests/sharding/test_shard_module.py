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


def compiled_in_place() -> nn.Module:
    model = MLP()
    model.compile(backend="fxshard")
    return model


def on_two_devices() -> nn.Module:
    model = MLP()
    model.head.to("meta")
    return model


@dataclass(frozen=True)
class Choosing(MixedPrecisionPolicy):
    """torch's policy with a field of torch 2.15."""

    param_dtype_override_fn: Any = None


def choosing(dtype: Any) -> dict[str, Any]:
    return {"mp_policy": Choosing(param_dtype=torch.bfloat16, param_dtype_override_fn=lambda p: dtype)}


def placing(placement: Any) -> dict[str, Any]:
    return {"shard_placement_fn": lambda p: placement}


PHASE, LINKS = nn.Parameter(torch.ones(4, dtype=torch.complex64)), nn.Parameter(torch.eye(4).to_sparse())
COMPILED = r"(?s)compile.*before|before.*compile"
NO_POLICY, NO_RESHARD = (
    r"offload_policy must be CPUOffloadPolicy\(\) or",
    r"(?s)reshard_after_forward.*True.*False.*None",
)
COLUMNS = {"shard_placement_fn": lambda p: Shard(-1) if p.dim() == 2 else None}
ODD_COLUMNS = r"blocks.0.down.weight of shape \[12, 25\].*2 ranks"
NO_PLACEMENT = "must return a Shard, .* or None, for blocks.0.norm.weight it returned 'columns'"
NO_SUCH_DIM = r"returned Shard\(dim=1\) for blocks.0.norm.weight, which has shape \[12\]"
NO_DTYPE = "must return a torch.dtype or None, for blocks.0.norm.weight it returned 'bfloat16'"
NEITHER_DTYPE = r"returned torch.float16 for blocks.0.norm.weight, which is stored in torch.float32"

REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "compiled": (lambda: compile_module(MLP()), {}, COMPILED),
    "compiled in place": (compiled_in_place, {}, COMPILED),
    "complex": (lambda: with_parameter("phase", PHASE), {}, r"(?s)complex.*inner\.phase.*ignored_params"),
    "sparse": (lambda: with_parameter("links", LINKS), {}, r"(?s)sparse.*inner\.links.*ignored_params"),
    "two devices": (on_two_devices, {}, r"(?s)(?=.*head\.weight)(?=.*meta)(?=.*cpu)"),
    "no forward": (lambda: nn.ModuleList([MLP()]), {}, r"(?s)ModuleList.*forward"),
    "no mesh": (MLP, {"mesh": (2,)}, r"(?s)mesh.*DeviceMesh"),
    "no policy": (MLP, {"mp_policy": torch.bfloat16}, r"(?s)mp_policy.*MixedPrecisionPolicy"),
    "no dtype": (MLP, choosing("bfloat16"), NO_DTYPE),
    "neither dtype": (MLP, choosing(torch.float16), NEITHER_DTYPE),
    "offload: a device": (MLP, {"offload_policy": "cpu"}, NO_POLICY),
    "offload: a bool": (MLP, {"offload_policy": True}, NO_POLICY),
    "offload: a class": (MLP, {"offload_policy": CPUOffloadPolicy}, NO_POLICY),
    "no placement": (MLP, placing("columns"), NO_PLACEMENT),
    "no such dimension": (MLP, placing(Shard(1)), NO_SUCH_DIM),
    "odd columns": (MLP, COLUMNS, ODD_COLUMNS),
    "reshard: a float": (MLP, {"reshard_after_forward": 1.5}, NO_RESHARD),
    "reshard: a word": (MLP, {"reshard_after_forward": "yes"}, NO_RESHARD),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(mesh: DeviceMesh, case: str) -> None:
    make, kwargs, message = REFUSED[case]
    model = make()
    with left_as_it_was(model), pytest.raises(ConfigError, match=message):
        fully_shard(model, **{"mesh": mesh, **kwargs})


def test_refuses_a_module_that_is_sharded_already(mesh: DeviceMesh) -> None:
    model = MLP()
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (model, model.blocks[0]):
        with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?i)(twice|already)"):
            fully_shard(module, mesh=mesh)


def test_refuses_a_unit_inside_a_unit_that_is_sharded_already(mesh: DeviceMesh) -> None:
    model = MLP()
    fully_shard(model, mesh=mesh)
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"(?s)(inner|inside|bottom|first|outer|already)"):
        fully_shard(model.blocks[0], mesh=mesh)


def absent_device_types() -> list[str]:
    available = {"cuda": torch.cuda.is_available(), "xpu": torch.xpu.is_available(), "meta": False}
    return [device_type for device_type, here in available.items() if not here]


@pytest.mark.parametrize("device_type", absent_device_types())
def test_refuses_a_mesh_on_a_device_that_is_not_here(fake_group: None, device_type: str) -> None:
    model = MLP()
    mesh = DeviceMesh(device_type, [0, 1])
    with left_as_it_was(model), pytest.raises(ConfigError, match=f"(?s)mesh.*{device_type}"):
        fully_shard(model, mesh=mesh)


def test_refuses_a_mesh_without_this_rank(fake_group: None) -> None:
    model = MLP()
    mesh = DeviceMesh("cpu", [1])
    with left_as_it_was(model), pytest.raises(ConfigError, match=r"rank \(0\) is not part of the mesh"):
        fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("module", [[], "model", None])
def test_refuses_what_is_no_module(mesh: DeviceMesh, module: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?i)module"):
        fully_shard(module, mesh=mesh)


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
