"""Parameters that are DTensors before they are sharded: what is sharded of them, and what modules read.

[Note: tensor parallelism]
`parallelize_module` makes DTensors on the mesh axes of tensor parallelism. Of such a parameter a unit takes the local
tensor: its rows are cut over the axis that shards, gathered over it, and their gradients reduced over it, as those of
any parameter. So a slot has the shape of the local tensor, and passes know nothing of the other axes. Modules read the
gathered local tensor as the DTensor that it was: a `from_local` behind the gather, in graphs behind the marker. Its
gradient has the placements of the parameter: `from_local` redistributes it, so a norm's weight, say, is all_reduced
over the tensor-parallel ranks before it is reduced with its unit. Collectives of tensor parallelism are nodes of the
graph like the user's own. Users see the DTensor of the rows on the axes of both, with FSDP2's placements.

With `dp_mesh_dims` parameters are DTensors on all axes before, whole on those that shard and replicate them. They are
read so, and activations are DTensors on all axes, too. Only the gradient differs: it is left partial on the axes of
`fully_shard`, whose reduction it then enters as any gradient does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fxshard import torch_fsdp2
from fxshard.errors import ConfigError
from fxshard.runtime.parameters import Layout, placed


@dataclass(frozen=True, eq=False)
class WholeMesh:
    """A mesh with the axes of data parallelism among others, as `fully_shard(dp_mesh_dims=...)` is given one."""

    mesh: DeviceMesh  # of all axes
    dims: Any  # torch's `DataParallelMeshDims`, which names those that shard and those that replicate

    @property
    def axes(self) -> tuple[int, ...]:
        """The numbers of those axes."""
        names = self.mesh.mesh_dim_names or ()
        return tuple(names.index(name) for name in (*self.dims.replicate_names, *self.dims.shard_names))


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """What a tensor-parallel parameter is besides its rows; see [Note: tensor parallelism]."""

    spec: Any  # of the DTensor of its rows, on all mesh axes
    before: Any  # of the DTensor that it was
    shape: tuple[int, ...]  # of the local tensor, of which the rows are a part
    within: WholeMesh | None = None  # the mesh that it was on, if that has the axes of `fully_shard`

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of the axes of tensor parallelism."""
        mesh: DeviceMesh = self.before.mesh
        data = self.within.axes if self.within else ()
        return [group for axis, group in enumerate(mesh.get_all_groups()) if axis not in data]

    @property
    def layout(self) -> Layout:
        """How the gathered local tensor lies on the axes of tensor parallelism, and its gradient."""
        meta, placements = self.before.tensor_meta, tuple(self.before.placements)
        of_grad: tuple[Placement, ...] | None = None
        if self.within:
            of_grad = tuple(Partial() if i in self.within.axes else each for i, each in enumerate(placements))
        return self.before.mesh, placements, meta.shape, meta.stride, of_grad

    def place(self, local: Tensor) -> Tensor:
        """Make of the gathered local tensor the DTensor that modules read."""
        return placed(local, self.layout)


def require_whole_on(parameters: Mapping[str, Tensor], within: WholeMesh) -> None:
    """Raise a ConfigError unless `parameters` are DTensors on a mesh, and whole on its axes of `fully_shard`."""
    mesh, wrong = within.mesh, []
    for name, p in parameters.items():
        if not isinstance(p, DTensor):
            wrong.append(f"{name} is a plain tensor")
        elif p.device_mesh != mesh:
            wrong.append(f"{name} is on {p.device_mesh}")
        elif any(type(p.placements[axis]) is not Replicate for axis in within.axes):
            wrong.append(f"{name} is {tuple(p.placements)}")
        elif not all(type(each) in (Shard, Replicate) for each in p.placements):
            wrong.append(f"{name} is {tuple(p.placements)}, neither cut nor whole")
    if wrong:
        raise ConfigError(
            f"with dp_mesh_dims parameters must be DTensors on the mesh that fully_shard was given, {mesh}, with "
            f"Replicate() on the axes that it names; but {', '.join(wrong)}. Make them with distribute_tensor or "
            "distribute_module on that mesh first."
        )


def require_parallel_beside(parameters: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Raise, naming all offenders, if DTensors among `parameters` cannot be sharded over `mesh` as well."""
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


def tensor_parallel(
    parameter: Tensor, mesh: DeviceMesh, dim: int, within: WholeMesh | None = None
) -> TensorParallel | None:
    """Describe a parameter that is to be cut along `dim` over `mesh`, `None` if it is no DTensor yet."""
    if not isinstance(parameter, DTensor):
        return None
    before = parameter._spec
    if within is None:
        spec = torch_fsdp2.spec_of_rows(before, mesh, dim)
    else:
        spec = torch_fsdp2.spec_within(before, mesh, dim, within.dims)
    return TensorParallel(spec, before, tuple(parameter.to_local().shape), within)
