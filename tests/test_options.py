"""What the backend refuses in its options, and in the models of the one-line path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard import fully_shard
from fxshard.errors import ConfigError
from tests.numerics.harness import EAGER, compile_module, sharded_mlp
from tests.numerics.models import MLP, WIDTH


def call(model: nn.Module, options: dict[str, Any]) -> None:
    compile_module(model, options={**EAGER, **options})(torch.ones(2, WIDTH))


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("reshard_after_foward", "reshard_after_forward"),
        ("param_type", "param_dtype"),
        ("memory_budget", "memory_budget_gib"),
        ("lowering", "lower"),
    ],
)
def test_names_the_option_nearest_to_an_unknown_one(mesh: DeviceMesh, given: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){given}.*mean '{nearest}'"):
        call(sharded_mlp(mesh), {given: None})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lower", "triton"),
        ("regions", True),
        ("bucket", "units"),
        ("bucket_peak_share", -1),
        ("bucket_peak_share", True),
        ("param_dtype", "bf16"),
        ("reduce_dtype", torch.int8),
        ("reshard_after_forward", "2"),
        ("mesh", 2),
        ("prefetch", -1),
        ("prefetch", "next"),
        ("reduce_scatter_max_input_buffers", 0),
        ("streams", "sied"),
        ("separate_reduce_scatter_group", 1),
        ("cudagraphs", "yes"),
        ("memory_budget_gib", 0),
        ("memory_budget_gib", "40"),
        ("inductor", {"reorder_for_peak_memory": True}),
        ("inductor", {"triton.cudagraphs": True}),
        ("offload", "cpu"),
        ("offload", {"param": 1}),
        ("offload", {"params": 1.5}),
        ("offload", {"optimizer": True}),
        ("offload", {"params": 1, "optimizer": False}),
        ("offload", {"params": 1, "pin_memory": 0}),
    ],
)
def test_names_the_option_whose_value_means_nothing(mesh: DeviceMesh, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        call(sharded_mlp(mesh), {option: value})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer state": (
        {"offload": {"optimizer": True}},
        r'offload=.*its state is on the host where they are.*Give "params": 1',
    ),
    "budget": ({"memory_budget_gib": 1e-9}, r"(?s)memory_budget_gib.*alive at %.*smaller units"),
    "cudagraphs": ({"cudagraphs": True, "lower": "inductor"}, "needs a model on CUDA; this one is on cpu"),
    "cudagraphs of what": ({"cudagraphs": True}, 'cudagraphs=True needs lower="inductor"'),
    "group": (
        {"separate_reduce_scatter_group": True},
        r"separate_reduce_scatter_group only act.*set_separate_reduce_scatter_group",
    ),
    "one line": ({"param_dtype": torch.bfloat16}, r"(?s)param_dtype.*fully_shard|fully_shard.*param_dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_says_what_an_option_needs(mesh: DeviceMesh, case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        call(sharded_mlp(mesh), options)


def test_refuses_a_mode_that_has_no_meaning(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match="mode"):
        compile_module(sharded_mlp(mesh), mode="max-autotune")(torch.ones(2, WIDTH))


def test_runs_within_a_budget_that_suffices(mesh: DeviceMesh) -> None:
    call(sharded_mlp(mesh), {"memory_budget_gib": 1, "prefetch": "auto"})


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_refuses_to_prefetch_what_is_not_sharded(mesh: DeviceMesh, direction: str) -> None:
    model = sharded_mlp(mesh)
    setter = getattr(model, f"set_modules_to_{direction}_prefetch")
    with pytest.raises(ValueError, match=rf"set_modules_to_{direction}_prefetch.*got Linear"):
        setter([nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="expects a list of modules or None"):
        setter(model)


def test_refuses_lists_of_a_module_that_gathers_nothing(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match=r"Sequential has no parameters of its own"):
        model.set_modules_to_forward_prefetch([model[0]])  # type: ignore[operator]


def test_one_line_refuses_a_model_on_the_meta_device(mesh: DeviceMesh) -> None:
    model = MLP().to("meta")
    with pytest.raises(ConfigError, match=r"(?s)(?=.*head\.weight)(?=.*meta)(?=.*fully_shard)(?=.*to_empty)"):
        compile_module(model)(torch.ones(2, WIDTH, device="meta"))


def test_one_line_refuses_complex_parameters_by_name(mesh: DeviceMesh) -> None:
    model = MLP()
    model.head.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"(?s)complex.*head\.phase"):
        call(model, {})
    assert type(model) is MLP


def test_one_line_refuses_a_mesh_of_three_axes(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ConfigError, match=r"the first replicates and the second shards; got 3 axes"):
        call(MLP(), {"mesh": mesh})


def test_asks_for_the_line_that_starts_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"init_process_group"):
        call(MLP(), {})
