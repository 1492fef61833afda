"""The axes of a mesh: the last one shards; the one before it, if there is one, replicates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from fxshard.errors import ConfigError


def shard_axis(mesh: DeviceMesh) -> int:
    """Return the number of the axis that shards."""
    return mesh.ndim - 1


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of the ranks that share the parameters with this one."""
    return _group(mesh, shard_axis(mesh))


def num_shards(mesh: DeviceMesh) -> int:
    """Return over how many ranks the parameters are sharded."""
    return mesh.size(shard_axis(mesh))


def shard_rank(mesh: DeviceMesh) -> int:
    """Return the place of this rank among those that share the parameters with it."""
    return mesh.get_local_rank(shard_axis(mesh))


def num_replicas(mesh: DeviceMesh) -> int:
    """Return how many ranks hold the same shard."""
    return mesh.size(0) if mesh.ndim > 1 else 1


def replicate_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold the same shard as this one, `None` if there is no other."""
    return _group(mesh, 0) if num_replicas(mesh) > 1 else None


def _group(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    group = mesh.get_group(axis)
    if isinstance(group, dist.ProcessGroup) and group.size() != mesh.size(axis):  # torch 2.11 looks for its name
        raise destroyed(group.group_name, mesh.size(axis))
    return group


def destroyed(name: str, num_ranks: int) -> ConfigError:
    """Return the error of a group that is gone, while a later one may have its name."""
    return ConfigError(
        f"parameters are sharded over process group {name!r} of {num_ranks} ranks, which has been destroyed. Shard a "
        "model anew over the present groups: load its state into one that was built after init_process_group()."
    )


def groups(mesh: DeviceMesh) -> Iterator[dist.ProcessGroup]:
    """Return the group of each axis, inner one first: what each of them agrees on in turn, all ranks agree on."""
    yield shard_group(mesh)
    if (outer := replicate_group(mesh)) is not None:
        yield outer


def placements(mesh: DeviceMesh, *, is_scalar: bool = False, dim: int = 0) -> tuple[Placement, ...]:
    """Return how a parameter that is cut along `dim` lies on the mesh; a scalar cannot be cut."""
    return (*(Replicate() for _ in range(mesh.ndim - 1)), Replicate() if is_scalar else Shard(dim))


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Return the global ranks of all axes."""
    return cast("list[int]", mesh.mesh.flatten().tolist())
