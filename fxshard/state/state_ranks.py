"""The ranks that hold a state together, and which of them wants it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxshard.errors import ConfigError
from fxshard.sharding.sharded_module import plain_module


@dataclass(frozen=True)
class StateRanks:
    """The ranks that hold a model's state together.

    Attributes:
        group: those of the mesh that contains all others, or all ranks there are; `None` without a process group.
        device: where its collectives work.
    """

    group: dist.ProcessGroup | None
    device: torch.device

    @property
    def ranks(self) -> list[int]:
        """Their global ranks."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def rank(self) -> int:
        """This one's place among them."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def recipient(self, recipient_rank: int | None) -> int | None:
        """The global rank of the one at this place, `None` for all.

        Raises:
            ConfigError: there is none.
        """
        if recipient_rank is None:
            return None
        if not isinstance(recipient_rank, int) or not 0 <= recipient_rank < len(self.ranks):
            raise ConfigError(
                f"recipient_rank must be None or one of the {len(self.ranks)} ranks that share the model, counted from "
                f"0, got {recipient_rank!r}."
            )
        return self.ranks[recipient_rank]


def module_in(model: object) -> nn.Module:
    """The model without the wrapper of `torch.compile`.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, got {type(model).__name__}.")
    return plain_module(model)


def require_optimizer(optim: object) -> None:
    """Raise unless it is an optimizer.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(optim, Optimizer):
        raise ConfigError(f"optim must be a torch.optim.Optimizer, got {type(optim).__name__}.")


def state_ranks_of(model: object) -> StateRanks:
    """The ranks that hold the state of `model` together: all there are for what is no model, or not sharded.

    Raises:
        ConfigError: they have no process group, on all of them.
    """
    meshes = list(_meshes(module_in(model).parameters())) if isinstance(model, nn.Module) else []
    device = torch.empty(0, device=meshes[0].device_type).device if meshes else torch.device("cpu")
    ranks = {id(mesh): set(cast("list[int]", mesh.mesh.flatten().tolist())) for mesh in meshes}
    for mesh in meshes:
        if mesh.ndim == 1 and all(other <= ranks[id(mesh)] for other in ranks.values()):
            return StateRanks(mesh.get_group(), device)
    members = sorted(set().union(*ranks.values()))
    if members and len(members) < dist.get_world_size():
        raise ConfigError(
            f"the model is sharded over ranks {members} of {dist.get_world_size()} by meshes of which none is 1-D and "
            "has them all, so there is no process group in which they could agree. Shard the root over such a mesh."
        )
    return StateRanks(dist.group.WORLD if dist.is_initialized() else None, device)


def _meshes(parameters: Iterable[Tensor]) -> Iterable[DeviceMesh]:
    found = {id(p.device_mesh): p.device_mesh for p in parameters if isinstance(p, DTensor)}
    return found.values()


def ranks_of(parameter: Tensor) -> tuple[int, ...]:
    """The ranks that share a parameter, none for one that is not shared."""
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(cast("list[int]", parameter.device_mesh.mesh.flatten().tolist()))


def require_bucket(bucket_mib: object) -> None:
    """Raise unless it is a size.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(bucket_mib, int | float) or not 0 < bucket_mib < math.inf:
        raise ConfigError(f"bucket_mib must be a positive number of MiB, got {bucket_mib!r}.")
