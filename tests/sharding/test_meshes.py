"""Parameters of one call that have a mesh of their own: the units that they make, and what these are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fxshard
from fxshard import torch_fsdp2
from fxshard.errors import ConfigError
from fxshard.sharding.sharded_module import units_under
from tests.fake_ranks import fake_ranks
from tests.numerics.harness import EAGER, compile_module
from tests.numerics.models import MLP, WIDTH

pytestmark = pytest.mark.skipif(
    torch_fsdp2.ShardPlacementResult is None, reason="this torch has no meshes of single parameters"
)

Placement = Callable[[nn.Parameter], Any]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two axes; that of all ranks is another one."""
    with fake_ranks(2, replicas=2) as mesh:
        yield mesh


def matrices_on(mesh: DeviceMesh) -> Placement:
    """Return what puts matrices, of which there are even ones, on a mesh of their own."""
    on_mesh = torch_fsdp2.placement_on(mesh)
    return lambda p: on_mesh(0) if p.dim() == 2 else None


def sharded(mesh: DeviceMesh, **kwargs: Any) -> Any:
    model = MLP()
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    for module in (*model.blocks, model):
        fxshard.fully_shard(module, mesh=whole, shard_placement_fn=matrices_on(mesh["shard"]), **kwargs)
    return model


def described(model: nn.Module) -> list[tuple[str, int, list[str]]]:
    units = units_under(model)
    return [(unit.fqn, unit.world_size, [member.fqn.rpartition(".")[2] for member in unit.members]) for unit in units]


def test_there_is_a_unit_for_each_mesh_and_that_of_most_ranks_comes_first(mesh: DeviceMesh) -> None:
    vectors, matrices = ["weight", "bias", "bias", "bias"], ["weight", "weight"]
    model = sharded(mesh)
    assert described(model) == [
        ("", 4, ["bias"]),
        ("<shard>", 2, ["weight"]),
        *(
            (f"blocks.{i}{own}", n, found)
            for i in range(2)
            for own, n, found in (("", 4, vectors), (".<shard>", 2, matrices))
        ),
    ]
    assert model.head.weight.device_mesh == mesh["shard"]
    assert model.head.weight.placements == (Shard(0),)


def test_settings_and_lists_of_a_module_hold_for_all_of_its_units(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    first, second = model.blocks
    first.set_gradient_divide_factor(6.0)
    first.set_modules_to_forward_prefetch([second])
    units = {unit.fqn: unit for unit in units_under(model)}
    for name in ("blocks.0", "blocks.0.<shard>"):
        assert units[name].settings.divide_factor == 6.0
        assert units[name].settings.forward_prefetch == (units["blocks.1"], units["blocks.1.<shard>"])


def test_a_number_of_ranks_after_forward_counts_on_each_mesh(mesh: DeviceMesh) -> None:
    model = sharded(mesh, reshard_after_forward=2)
    assert {(unit.world_size, unit.settings.reshard_after_forward) for unit in units_under(model)} == {
        (4, 2),
        (2, True),
    }


def test_fsdp2_gets_and_gives_meshes_of_parameters(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    before = described(model)
    assert described(fxshard.adopt(fxshard.release(model))) == before
    assert {unit.fqn for unit in units_under(model)} == {name for name, *_ in before}


def test_graphs_name_the_units_and_explain_knows_them(mesh: DeviceMesh) -> None:
    x, model = torch.ones(2, WIDTH), sharded(mesh)
    names = {name for name, *_ in described(model)}
    assert set(fxshard.explain(model, x, options=EAGER).units) == names
    assert fxshard.bisect_numerics(model, x, options=EAGER) is None
    compiled = compile_module(model, options=EAGER)
    compiled(x).sum().backward()
    forward, backward = fxshard.compiled_graphs(compiled)
    assert "%unshard_blocks_0_shard" in forward.text
    assert "unit=blocks.1.<shard>@0" in backward.text


def test_a_mesh_that_fully_shard_would_not_take_is_refused_by_name(mesh: DeviceMesh) -> None:
    of_replicas = torch_fsdp2.placement_on(mesh["shard"])(0)
    of_replicas.mesh_info = object()
    for placement, message in (
        (of_replicas, r"returned <object .*> for blocks\.0\.norm\.weight\. The mesh must have one axis"),
        (torch_fsdp2.placement_on(mesh["shard"])(3), r"Shard\(dim=3\) for blocks\.0\.norm\.weight"),
    ):
        model = MLP()
        with pytest.raises(ConfigError, match=message):
            fxshard.fully_shard(model, mesh=mesh["shard"], shard_placement_fn=lambda p, given=placement: given)
        assert type(model) is MLP
        assert not any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
