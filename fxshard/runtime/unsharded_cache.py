"""Parameters that stay unsharded from one microbatch to the next.

[Note: resident]
A unit's parameters are *resident* while microbatches accumulate: the first graph that reads them has them launched as
one all_gather and waits where it needs them (`passes/read_resident.py`), later ones find them. Which units are is the
user's word (`set_reshard_after_backward(False)`), or the option `resident_gib`, for as long as their gradients are not
reduced. The backward that reduces a unit's gradients takes the copies over and frees them.

A copy is of an epoch (`Unit.epoch`), which a write to a parameter changes. Writes of fused and foreach optimizers
raise no version, so copies are dropped before an optimizer of torch steps, and after, for a closure may gather again.
What torch does not count and no optimizer does (`.data`, `torch._foreach_*`) is for the user to say, with `reshard`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxshard import torch_private
from fxshard.ir import collectives
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.variant import Slots, in_order
from fxshard.runtime import profiler_ranges
from fxshard.runtime.accumulation import Units

if TYPE_CHECKING:
    from fxshard.runtime.unit import Unit


class UnshardedCache:
    """The parameters of one unit while they are resident; see [Note: resident].

    Attributes:
        wanted: whether the user wants them kept after backward.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._copies: dict[SlotIndex, Tensor] = {}
        self._epoch = 0

    @property
    def holds(self) -> bool:
        """Whether there are copies, of whichever values."""
        return bool(self._copies)

    def is_there(self, unit: Unit) -> bool:
        """Whether the copies are there and of the present values; old ones are dropped."""
        if self._copies and self._epoch != unit.epoch():
            self.drop()
        return bool(self._copies)

    def parameters(self, unit: Unit, slots: Iterable[SlotIndex]) -> list[Tensor]:
        """Some parameters, each of its shape in the unit's unsharded dtype, to be waited for; launches if need be."""
        if not self.is_there(unit):
            self._epoch = unit.epoch()
            self._copies = unit.outside_graphs("resident", "all_gather", "all parameters", _launch)([unit])
            unit.microbatches.hold()
        return [self._copies[slot] for slot in slots]

    def drop(self) -> None:
        """Free the copies."""
        if self._copies:
            with torch_private.unseen_by_policies():
                for copy in self._copies.values():
                    collectives.WAIT(copy)  # what nobody waits for keeps its buffer for as long as the process runs
            self._copies = {}


def _launch(units: list[Unit]) -> dict[SlotIndex, Tensor]:
    (unit,) = units
    with (
        torch.no_grad(),
        torch.inference_mode(False),
        torch_private.unseen_by_policies(),
        profiler_ranges.of_unit(unit.fqn),
    ):
        return collectives.launch_parameters({i: shard.flat for i, shard in enumerate(unit.shards)}, unit.plan)


def chosen_for(units: Units, reads: Slots, budget_bytes: int, *, trains: bool) -> frozenset[str]:
    """Keys of the units whose parameters come into a graph that runs now.

    Args:
        units: of this call of the graph.
        reads: unit key -> the parameters that the graph gathers.
        budget_bytes: what the user's options let resident parameters take.
        trains: whether the graph is a forward or a backward; one without gradients takes what is there, and no more.
    """
    found = {key: units[key] for key in reads}
    return frozenset(
        key for key, unit in found.items() if unit.resident.is_there(unit) or (trains and _wants(unit, budget_bytes))
    )


def _wants(unit: Unit, budget_bytes: int) -> bool:
    if unit.world_size == 1:
        return False  # a parameter is a view of its shard
    return unit.resident.wanted or (not unit.accumulation.sync and unit in unit.microbatches.resident_in(budget_bytes))


def parameters_for(chosen: frozenset[str], units: Units, reads: Slots) -> list[Tensor]:
    """The parameters that a variant takes, in its order."""
    slots: dict[str, list[SlotIndex]] = {}
    for key, slot in in_order(chosen, reads):
        slots.setdefault(key, []).append(slot)
    return [value for key, mine in slots.items() for value in units[key].resident.parameters(units[key], mine)]


def within(units: Sequence[Unit], budget_bytes: int) -> frozenset[Unit]:
    """The units to keep, by how much communication each byte that is held saves, as far as the budget goes.

    One that backward would gather again saves two gathers in each microbatch, any other one. Of equal ones the first
    go first, so that all ranks choose alike.
    """
    chosen, left = set(), budget_bytes
    for unit in sorted(units, key=lambda unit: not unit.plan.regathers):
        if unit.world_size > 1 and unit.plan.unsharded_bytes <= left:
            chosen.add(unit)
            left -= unit.plan.unsharded_bytes
    return frozenset(chosen)
