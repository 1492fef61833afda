"""A process group for reductions alone.

The collectives of one communicator run one after the other: a reduction waits for the gathers that were launched before
it, although data flows the same way in both. With a group of their own they share the link instead.

As FSDP2's `set_separate_reduce_scatter_group` (`_fully_shard.py`, torch 2.15).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.runtime import mesh_axes, rank_values
from fxshard.runtime.unit import Unit

TOPIC = "set_separate_reduce_scatter_group"


def separate(units: Iterable[Unit], enable: bool = True) -> None:
    """Give the reductions of some units a group of their own, or take it back.

    Collective over the ranks of each unit, in the order of `units`. A model has one such group for each set of ranks;
    it is kept when it is taken back, for the next time.

    Raises:
        ConfigError: `enable` is no bool, ranks call this differently or not at all, or torch would wait for ranks
            outside of the mesh.
    """
    if not isinstance(enable, bool):
        raise ConfigError(f"set_separate_reduce_scatter_group: enable must be a bool, got {enable!r}.")
    for unit in [unit for unit in units if unit.world_size > 1]:
        if enable and unit.reduce_group is None:
            unit.reduce_group = _known(unit) or _twin_of(unit)
        unit.uses_reduce_group = enable
        unit.publish()


def _known(unit: Unit) -> dist.ProcessGroup | None:
    """The group that another unit of the model has for the same ranks."""
    ranks = dist.get_process_group_ranks(mesh_axes.shard_group(unit.mesh))
    made = (other.reduce_group for other in unit.microbatches.units)
    return next((g for g in made if g is not None and dist.get_process_group_ranks(g) == ranks), None)


def _twin_of(unit: Unit) -> dist.ProcessGroup:
    """Another group of the same ranks, backends and timeout."""
    group = mesh_axes.shard_group(unit.mesh)
    ranks = dist.get_process_group_ranks(group)
    world = dist.group.WORLD
    if getattr(world, "bound_device_id", None) is not None and len(ranks) < dist.get_world_size():
        raise ConfigError(
            f"set_separate_reduce_scatter_group: the mesh has {len(ranks)} of {dist.get_world_size()} ranks, and after "
            "init_process_group(device_id=...) torch makes a group together with all ranks. Leave device_id out, or "
            "reduce on the mesh's group."
        )
    name = unit.label
    said = rank_values.gather_texts(TOPIC, name, group, remedy="All ranks of the mesh must call it alike.")
    if others := sorted(set(said) - {name}):
        raise ConfigError(
            f"set_separate_reduce_scatter_group: this rank makes a group for unit {name}, another one for {others[0]}. "
            "All ranks of the mesh must call it alike."
        )
    twin = dist.new_group(
        ranks,
        backend=dist.get_backend_config(group),
        timeout=torch_private.timeout_of(group, unit.mesh.device_type),
        use_local_synchronization=True,
        group_desc="fxshard_reduce_scatter",
    )
    if not isinstance(twin, dist.ProcessGroup):
        raise ConfigError("set_separate_reduce_scatter_group: this rank is none of the mesh's.")
    return twin
