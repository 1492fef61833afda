"""Process groups beside those of the mesh: for reductions alone, and for some of the ranks.

The collectives of one communicator run one after the other: a reduction waits for the gathers that were launched before
it, although data flows the same way in both. With a group of their own they share the link instead.

As FSDP2's `set_separate_reduce_scatter_group` (`_fully_shard.py`, torch 2.15).

A subgroup shares parameters between forward and backward where `reshard_after_forward` is a number.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.ranks.rendezvous import gather_texts
from fxshard.runtime import mesh_axes
from fxshard.runtime.unit import Unit

TOPIC = "set_separate_reduce_scatter_group"


def separate(units: Iterable[Unit], enable: bool = True) -> None:
    """Give the reductions of some units a group of their own, or take it back.

    Collective over the ranks of each unit, in the order of `units`. A model has one such group for each set of ranks;
    it is kept when it is taken back, for the next time.
    """
    if not isinstance(enable, bool):
        raise ConfigError(f"set_separate_reduce_scatter_group: enable must be a bool, got {enable!r}.")
    for unit in [unit for unit in units if unit.world_size > 1]:
        if enable and unit.groups.reduce is None:
            unit.groups.reduce = _known(unit) or _twin_of(unit)
        unit.set(uses_reduce_group=enable)


def _known(unit: Unit) -> dist.ProcessGroup | None:
    """The group that another unit of the model has for the same ranks."""
    ranks = dist.get_process_group_ranks(mesh_axes.shard_group(unit.mesh))
    made = (other.groups.reduce for other in unit.model.units)
    return next((g for g in made if g is not None and dist.get_process_group_ranks(g) == ranks), None)


def _twin_of(unit: Unit) -> dist.ProcessGroup:
    """Another group of the same ranks, backends and timeout."""
    group = mesh_axes.shard_group(unit.mesh)
    ranks = dist.get_process_group_ranks(group)
    _require_no_other_ranks("set_separate_reduce_scatter_group", ranks, "reduce on the mesh's group")
    name = unit.label
    said = gather_texts(TOPIC, name, group, remedy="All ranks of the mesh must call it alike.")
    if others := sorted(set(said) - {name}):
        raise ConfigError(
            f"set_separate_reduce_scatter_group: this rank makes a group for unit {name}, another one for {others[0]}. "
            "All ranks of the mesh must call it alike."
        )
    twin = _made([ranks], unit.mesh, "fxshard_reduce_scatter")
    if twin is None:
        raise ConfigError("set_separate_reduce_scatter_group: this rank is none of the mesh's.")
    return twin


@functools.cache
def _subgroups() -> weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]:
    return weakref.WeakKeyDictionary()


def subgroup_of(mesh: DeviceMesh, size: int) -> dist.ProcessGroup:
    """Return this rank's subgroup of `size` neighbours on `mesh`; collective the first time."""
    group = mesh_axes.shard_group(mesh)
    known = _subgroups().setdefault(group, {})
    if size not in known:
        ranks = mesh_axes.ranks_of(mesh)
        _require_no_other_ranks(f"reshard_after_forward={size}", ranks, "pass True or False")
        blocks = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        own = [block for block in blocks if dist.get_rank() in block]
        made = _made(blocks if _is_made_together() else own, mesh, "fxshard_subgroup")
        assert made is not None, "require_mesh has found this rank in the mesh"
        known[size] = made
    return known[size]


def _require_no_other_ranks(call: str, ranks: Sequence[int], instead: str) -> None:
    """Raise where making a group of some of these ranks would wait for others."""
    if _is_made_together() and len(ranks) < dist.get_world_size():
        raise ConfigError(
            f"{call}: the mesh has {len(ranks)} of {dist.get_world_size()} ranks, and after "
            "init_process_group(device_id=...) torch makes a group together with all ranks. Leave device_id out, or "
            f"{instead}."
        )


def _is_made_together() -> bool:
    """Whether torch makes groups together with all ranks: after `init_process_group(device_id=...)`."""
    return getattr(dist.group.WORLD, "bound_device_id", None) is not None


def _made(groups: Iterable[Sequence[int]], mesh: DeviceMesh, description: str) -> dist.ProcessGroup | None:
    """Make groups of the kind that a mesh has, of some of its ranks; return the one of this rank."""
    like = mesh_axes.shard_group(mesh)
    align_names(like)
    made = [
        dist.new_group(
            list(ranks),
            backend=dist.get_backend_config(like),
            timeout=torch_private.timeout_of(like, mesh.device_type),
            use_local_synchronization=True,
            group_desc=description,
        )
        for ranks in groups
    ]
    return next((group for group in made if isinstance(group, dist.ProcessGroup)), None)


def align_names(group: dist.ProcessGroup) -> None:
    """Let the ranks of a group have made as many groups, by which torch names the next; collective."""
    counts = gather_texts("process groups", str(torch_private.num_groups()), group, remedy="All ranks must make them.")
    for _ in range(max(map(int, counts)) - torch_private.num_groups()):
        dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="fxshard_names")
