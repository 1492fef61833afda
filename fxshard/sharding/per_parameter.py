"""What the user's functions say of single parameters: in which dtype one is gathered, how cut, over which mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from fxshard import torch_fsdp2
from fxshard.errors import ConfigError
from fxshard.runtime import mesh_axes
from fxshard.runtime.parameters import ParameterSettings, local_of
from fxshard.sharding.mesh import require_mesh

Chooser = Callable[[str, nn.Parameter], ParameterSettings]
"""(FQN, parameter before it is sharded) -> what holds for it."""


def like_its_unit(fqn: str, parameter: nn.Parameter) -> ParameterSettings:
    """Choose nothing."""
    return ParameterSettings()


def chooser(mp_policy: MixedPrecisionPolicy, shard_placement_fn: Any, mesh: DeviceMesh) -> Chooser:
    """Return what asks the user's functions, each once per parameter."""

    def settings_of(fqn: str, parameter: nn.Parameter) -> ParameterSettings:
        placement = shard_placement_fn(parameter) if shard_placement_fn is not None else None
        own_mesh = None
        if isinstance(placement, torch_fsdp2.ShardPlacementResult or ()):
            placement, own_mesh = placement.placement, _mesh(fqn, placement.mesh_info)
        return ParameterSettings(
            keeps_dtype=_keeps_dtype(fqn, parameter, mp_policy),
            dim=0 if placement is None else _dim(fqn, parameter, placement, mesh_axes.num_shards(own_mesh or mesh)),
            mesh=own_mesh,
        )

    return settings_of


def _mesh(fqn: str, mesh_info: Any) -> DeviceMesh:
    if not torch_fsdp2.is_our_kind(mesh_info):
        raise ConfigError(
            f"shard_placement_fn returned {mesh_info!r} for {fqn}. The mesh must have one axis, which shards, or two, "
            "of which the first replicates: FSDPMeshInfo(mesh, shard_mesh_dim=0), or HSDPMeshInfo(mesh, "
            "shard_mesh_dim=1, replicate_mesh_dim=0)."
        )
    return require_mesh(mesh_info.mesh)


def _dim(fqn: str, parameter: nn.Parameter, placement: object, num_ranks: int) -> int:
    shape = list(local_of(parameter).shape if isinstance(parameter, DTensor) else parameter.shape)
    if type(placement) is not Shard:
        raise ConfigError(
            f"shard_placement_fn must return a Shard, a ShardPlacementResult or None, for {fqn} it returned "
            f"{placement!r}."
        )
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < max(1, len(shape)):
        raise ConfigError(f"shard_placement_fn returned {placement!r} for {fqn}, which has shape {shape}.")
    if dim and shape[dim] % num_ranks:
        raise ConfigError(
            f"shard_placement_fn returned {placement!r} for {fqn} of shape {shape}: along another dimension than 0 it "
            f"must divide evenly among the {num_ranks} ranks, as in FSDP2."
        )
    return dim


def _keeps_dtype(fqn: str, parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> bool:
    override = getattr(policy, "param_dtype_override_fn", None)  # from torch 2.15 on
    dtype = override(parameter) if override is not None else None
    if not isinstance(dtype, torch.dtype | None):
        raise ConfigError(
            f"mp_policy.param_dtype_override_fn must return a torch.dtype or None, for {fqn} it returned {dtype!r}."
        )
    if dtype not in (None, policy.param_dtype, parameter.dtype):
        raise ConfigError(
            f"mp_policy.param_dtype_override_fn returned {dtype} for {fqn}, which is stored in {parameter.dtype}. It "
            f"can be gathered in that, or in param_dtype={policy.param_dtype} (None)."
        )
    return dtype is not None and dtype != policy.param_dtype
