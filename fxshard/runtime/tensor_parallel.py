"""Parameters that are DTensors before they are sharded: what is sharded of them, and what modules read.

[Note: tensor parallelism]
`parallelize_module` makes DTensors on the mesh axes of tensor parallelism. Of such a parameter a unit takes the local
tensor: its rows are cut over the axis that shards, gathered over it, and their gradients reduced over it, as those of
any parameter. So a slot has the shape of the local tensor, and passes know nothing of the other axes. What modules read
is the gathered local tensor as the DTensor that it was; `place` makes it, in graphs too: Dynamo calls it a node, and
AOTAutograd traces through it. Its gradient has the placements of the parameter: `from_local` redistributes it, so a
norm's weight, say, is all_reduced over the tensor-parallel ranks before it is reduced with its unit. Collectives of
tensor parallelism are nodes of the graph like the user's own.

What users see is the DTensor of the rows on the axes of both, with the placements that FSDP2 gives it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fxshard import torch_fsdp2
from fxshard.errors import ConfigError


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """What a tensor-parallel parameter is besides its rows; see [Note: tensor parallelism].

    Attributes:
        spec: of the DTensor of its rows, on all mesh axes.
        shape: of the local tensor, of which the rows are a part.
        place: makes of the gathered local tensor the DTensor that modules read.
    """

    spec: Any
    shape: tuple[int, ...]
    place: Callable[[Tensor], Tensor]


def require_parallel_beside(parameters: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Raise, naming all offenders, if DTensors among `parameters` cannot be sharded over `mesh` as well.

    Raises:
        ConfigError: their mesh and `mesh` are no slices of one mesh, or have an axis in common; or a placement is
            neither `Shard` nor `Replicate`.
    """
    dtensors = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
    meshes = {p.device_mesh: name for name, p in dtensors.items()}
    for other, name in meshes.items():
        if (why := torch_fsdp2.why_not_beside(mesh, other)) is not None:
            raise ConfigError(
                f"{name} is a DTensor on the mesh {other}, which has no place beside the mesh {mesh} that fully_shard "
                f'was given: {why}. Slice both from one: mesh = init_device_mesh(device, (2, 4), mesh_dim_names=("dp", '
                '"tp")); parallelize_module(module, mesh["tp"], ...); fully_shard(module, mesh=mesh["dp"]).'
            )
    unknown = [
        f"{name} {tuple(p.placements)}"
        for name, p in dtensors.items()
        if not all(each.is_replicate() or each.is_shard() for each in p.placements)
    ]
    if unknown:
        raise ConfigError(
            f"DTensor parameters with other placements than Shard and Replicate cannot be sharded: {', '.join(unknown)}. "
            "Redistribute them first, or pass them in ignored_params."
        )


def tensor_parallel(parameter: Tensor, mesh: DeviceMesh) -> TensorParallel | None:
    """Describe a parameter that is to be sharded over `mesh`, `None` if it is no DTensor yet."""
    if not isinstance(parameter, DTensor):
        return None
    given = parameter.device_mesh
    groups = tuple(given.get_group(axis).group_name for axis in range(given.ndim))
    place = _placing(given, groups, tuple(parameter.placements), parameter.shape, parameter.stride())
    local = tuple(parameter.to_local().shape)
    return TensorParallel(torch_fsdp2.spec_of_rows(parameter, mesh), local, place)


@functools.cache  # blocks that are alike share a graph only if they share this
def _placing(
    mesh: DeviceMesh,
    groups: tuple[str, ...],  # an equal mesh of another process group is another one
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> Callable[[Tensor], Tensor]:
    def place(local: Tensor) -> Tensor:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return torch.compiler.allow_in_graph(place)
