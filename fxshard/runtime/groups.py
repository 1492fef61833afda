"""A process group for reductions alone.

The collectives of one communicator run one after the other: a reduction waits for the gathers that were launched before
it, although data flows the same way in both. With a group of their own they share the link instead.

As FSDP2's `set_separate_reduce_scatter_group` (`_fully_shard.py`, torch 2.15).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from fxshard.errors import ConfigError
from fxshard.runtime.unit import Unit


def separate(units: Iterable[Unit], enable: bool = True) -> None:
    """Give the reductions of some units a group of their own, one for each set of ranks, or take it back.

    Collective over the ranks of each unit, in the order of `units`.

    Raises:
        ConfigError: `enable` is no bool.
    """
    if not isinstance(enable, bool):
        raise ConfigError(f"set_separate_reduce_scatter_group: enable must be a bool, got {enable!r}.")
    units = [unit for unit in units if unit.world_size > 1]
    made = {unit.mesh: unit.reduce_group for unit in units if unit.reduce_group is not None}
    for unit in units:
        if enable and unit.mesh not in made:
            made[unit.mesh] = _twin_of(unit.mesh.get_group())
        unit.reduce_group = made[unit.mesh] if enable else None
        unit.publish()


def _twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks and backends."""
    twin = dist.new_group(
        dist.get_process_group_ranks(group),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
        group_desc="fxshard_reduce_scatter",
    )
    if not isinstance(twin, dist.ProcessGroup):
        raise ConfigError("set_separate_reduce_scatter_group: this rank is none of the mesh's.")
    return twin
