"""`dp_mesh_dims`: what `fully_shard` refuses; a refusal leaves the module as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fxshard import fully_shard, torch_fsdp2
from fxshard.errors import ConfigError
from fxshard.sharding.sharded_module import units_under
from tests.fake_ranks import fake_ranks
from tests.sharding.untouched import left_as_it_was

needs_dims = pytest.mark.skipif(not torch_fsdp2.HAS_MESH_DIMS, reason="this torch has no DataParallelMeshDims")


@pytest.fixture
def whole() -> Iterator[DeviceMesh]:
    with fake_ranks(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def dims(**axes: Any) -> Any:
    return fsdp.DataParallelMeshDims(**axes)


def layer(mesh: DeviceMesh | None, *placements: Any) -> Any:
    model = nn.Linear(4, 4)
    if mesh is not None:
        weight = distribute_tensor(model.weight.detach(), mesh, placements, src_data_rank=None)
        model.register_parameter("weight", nn.Parameter(weight))
        model.register_parameter("bias", None)
    return model


def refuses(model: nn.Module, message: str, error: type[Exception] = ConfigError, **kwargs: Any) -> None:
    with left_as_it_was(model), pytest.raises(error, match=message):
        fully_shard(model, **kwargs)


def test_wants_torchs_own_class(whole: DeviceMesh) -> None:
    refuses(nn.Linear(4, 4), r"dp_mesh_dims must be a torch.*, got 'dp'", mesh=whole, dp_mesh_dims="dp")


@needs_dims
@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"shard": "data"}, "dp_mesh_dims names data, but the axes of the mesh are dp, tp"),
        ({"shard": "dp", "replicate": ("pod", "tp")}, "dp_mesh_dims names pod, but"),
        ({"replicate": "dp"}, "must name an axis that shards, and each axis once"),
        ({"shard": "dp", "replicate": "dp"}, "must name an axis that shards, and each axis once"),
    ],
)
def test_says_which_axes_are_wrong(whole: DeviceMesh, axes: Any, message: str) -> None:
    refuses(layer(whole, Replicate(), Shard(0)), message, mesh=whole, dp_mesh_dims=dims(**axes))


@needs_dims
def test_wants_a_mesh_with_names(whole: DeviceMesh) -> None:
    for mesh in (None, DeviceMesh("cpu", torch.arange(4).view(2, 2))):
        refuses(layer(None), "mesh must be one whose axes have names", mesh=mesh, dp_mesh_dims=dims(shard="dp"))


@needs_dims
def test_wants_parameters_that_are_whole_on_the_axes_of_the_data(whole: DeviceMesh) -> None:
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    wrong = {
        "weight is a plain tensor, bias is a plain tensor": layer(None),
        r"weight is on DeviceMesh": layer(other, Shard(0)),
        r"weight is \(Shard\(dim=0\), Replicate\(\)\)": layer(whole, Shard(0), Replicate()),
    }
    for message, model in wrong.items():
        refuses(model, f"(?s)with dp_mesh_dims.*{message}", mesh=whole, dp_mesh_dims=dims(shard="dp"))


@needs_dims
def test_takes_a_number_of_ranks_to_reshard_to() -> None:
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        kwargs = {"mesh": mesh, "dp_mesh_dims": dims(shard="dp"), "reshard_after_forward": 2}
        (unit,) = units_under(fully_shard(layer(mesh, Replicate(), Shard(0)), **kwargs))
        assert unit.groups.subgroup is not None
        assert dist.get_process_group_ranks(unit.groups.subgroup) == [0, 2]
