"""Parameters that are DTensors before they are sharded: what is sharded of them, and what modules read.

[Note: tensor parallelism]
`parallelize_module` makes DTensors on the mesh axes of tensor parallelism. Of such a parameter a unit takes the local
tensor: its rows are cut over the axis that shards, gathered over it, and their gradients reduced over it, as those of
any parameter. So a slot has the shape of the local tensor, and passes know nothing of the other axes. What modules read
is the gathered local tensor as the DTensor that it was: a `from_local` behind the gather, in graphs behind the marker.
Its gradient has the placements of the parameter: `from_local` redistributes it, so a
norm's weight, say, is all_reduced over the tensor-parallel ranks before it is reduced with its unit. Collectives of
tensor parallelism are nodes of the graph like the user's own.

What users see is the DTensor of the rows on the axes of both, with the placements that FSDP2 gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxshard import torch_fsdp2
from fxshard.errors import ConfigError
from fxshard.runtime.parameters import Layout, placed


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """What a tensor-parallel parameter is besides its rows; see [Note: tensor parallelism].

    Attributes:
        spec: of the DTensor of its rows, on all mesh axes.
        before: of the DTensor that it was.
        shape: of the local tensor, of which the rows are a part.
    """

    spec: Any
    before: Any
    shape: tuple[int, ...]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of the axes of tensor parallelism."""
        mesh: DeviceMesh = self.before.mesh
        return mesh.get_all_groups()

    @property
    def layout(self) -> Layout:
        """How the gathered local tensor lies on the axes of tensor parallelism."""
        meta = self.before.tensor_meta
        return self.before.mesh, tuple(self.before.placements), meta.shape, meta.stride

    def place(self, local: Tensor) -> Tensor:
        """Make of the gathered local tensor the DTensor that modules read."""
        return placed(local, self.layout)


def require_parallel_beside(parameters: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Raise, naming all offenders, if DTensors among `parameters` cannot be sharded over `mesh` as well.

    Raises:
        ConfigError: their mesh and `mesh` are no slices of one mesh, or have an axis in common; or a placement is
            neither `Shard` nor `Replicate`.
    """
    dtensors = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
    meshes = {p.device_mesh: name for name, p in reversed(dtensors.items())}  # the first of each
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
        if not all(type(each) in (Shard, Replicate) for each in p.placements)
    ]
    if unknown:
        raise ConfigError(
            f"DTensors with other placements than Shard and Replicate cannot be sharded: {', '.join(unknown)}. "
            "Redistribute them first, or pass them in ignored_params."
        )


def tensor_parallel(parameter: Tensor, mesh: DeviceMesh, dim: int) -> TensorParallel | None:
    """Describe a parameter that is to be cut along `dim` over `mesh`, `None` if it is no DTensor yet."""
    if not isinstance(parameter, DTensor):
        return None
    before = parameter._spec
    return TensorParallel(torch_fsdp2.spec_of_rows(before, mesh, dim), before, tuple(parameter.to_local().shape))
