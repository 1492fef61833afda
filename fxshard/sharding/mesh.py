"""Which ranks share the parameters: the default mesh, and what a given one must satisfy."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard import torch_fsdp2
from fxshard.errors import ConfigError
from fxshard.options import launched_world_size
from fxshard.runtime import gloo, mesh_axes
from fxshard.runtime.tensor_parallel import WholeMesh

_log = logging.getLogger(__name__)


def require_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Raise unless `mesh` has an axis that shards, at most one before it, a device that exists and this rank in it."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}.")
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"mesh: expected one axis, which shards, or two, of which the first replicates and the second shards; got "
            f'{mesh.ndim} axes: {mesh}. Slice them: mesh[name] or mesh["replicate", "shard"].'
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ConfigError(
            f"mesh: two axes need names, got {mesh}. Build it with init_device_mesh(device, (replicas, shards), "
            'mesh_dim_names=("replicate", "shard")).'
        )
    if not _is_here(mesh.device_type):
        raise ConfigError(f"the mesh is on {mesh.device_type!r}, but this machine has no such device.")
    if mesh.get_coordinate() is None:
        raise ConfigError(f"this rank ({dist.get_rank()}) is not part of the mesh {mesh}.")
    return mesh


def data_axes(mesh: DeviceMesh | None, dims: Any) -> tuple[DeviceMesh, WholeMesh]:
    """Return the axes of `mesh` that `dp_mesh_dims` names, as a mesh of their own, and what they are axes of."""
    if not torch_fsdp2.is_mesh_dims(dims):
        raise ConfigError(
            f"dp_mesh_dims must be a torch.distributed.fsdp.DataParallelMeshDims (torch 2.13 and later), got {dims!r}."
        )
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    if not isinstance(mesh, DeviceMesh) or names is None:
        raise ConfigError(f"dp_mesh_dims names axes of the mesh: mesh must be one whose axes have names, got {mesh!r}.")
    wanted = (*dims.replicate_names, *dims.shard_names)
    if unknown := [name for name in wanted if name not in names]:
        raise ConfigError(f"dp_mesh_dims names {', '.join(unknown)}, but the axes of the mesh are {', '.join(names)}.")
    if not dims.shard_names or len(set(wanted)) < len(wanted):
        raise ConfigError(
            f"dp_mesh_dims must name an axis that shards, and each axis once, got {dims!r}. Parameters that are only "
            "replicated are not sharded: leave them to DistributedDataParallel or torch's replicate."
        )
    return torch_fsdp2.data_mesh(mesh, dims), WholeMesh(mesh, dims)


def resharding(mesh: DeviceMesh, reshard_after_forward: bool | int | None) -> bool | int | None:
    """Return what to do after forward, with True and False for the numbers of ranks that mean the same."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    num_ranks = mesh_axes.num_shards(mesh)
    if reshard_after_forward < 1 or num_ranks % reshard_after_forward:
        raise ConfigError(
            f"reshard_after_forward={reshard_after_forward}: as a number of ranks it must be a factor of the "
            f"{num_ranks} that share the parameters."
        )
    if reshard_after_forward == 1:
        say_that_one_keeps_all()
        return False
    return True if reshard_after_forward == num_ranks else reshard_after_forward


@functools.cache
def say_that_one_keeps_all() -> None:
    """Say what the number 1 means, which somebody may have written for True."""
    _log.warning("fxshard: reshard_after_forward=1 keeps the parameters of a unit on each rank: it is False, not True.")


def default_mesh(device_type: str | None = None) -> DeviceMesh:
    """Return a mesh of all ranks where parameters are to be; initialise a process group if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if not dist.is_initialized():
        if launched_world_size() > 1:
            dist.init_process_group(None if accelerator else gloo.BACKEND)
        else:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device_type or (accelerator.type if accelerator else "cpu"), (dist.get_world_size(),))


def _is_here(device_type: str) -> bool:
    try:
        return device_type == "cpu" or bool(torch.get_device_module(device_type).is_available())
    except RuntimeError:  # "meta" and the like have no module
        return False
