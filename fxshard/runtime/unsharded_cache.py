"""Parameters that are gathered outside of the graph that reads them, until it takes them or they are dropped.

[Note: unsharded cache]
A model has one cache for what `prefetcher.py` launches ahead, and for what stays from one microbatch to the next. Code
that takes gathered parameters waits for them, and so must code that drops them: a collective that nobody waits for
keeps its buffers for as long as the process runs. They are of the epoch (`Unit.epoch`) in which they were launched;
code that finds them of an old one decides what that means. What is read outside of graphs (`eager.py`) belongs to one
call and one mode of autograd, and is not here.

    what is kept                  key                        freed by, if nobody takes it
    ----------------------------  -------------------------  ----------------------------------------------------------
    launched ahead, "next"        flat, dtype, parts         the request of something else; as below
    launched ahead, "listed"      flat, dtype, parts         the next call or backward; the end of the call
    launched ahead, "asked"       flat, dtype, parts         becomes "listed" when the next call begins
    launched ahead, "stepped"     flat, dtype, parts         the end of the next call; the next step
    "resident"                    unit                       the backward that reduces; a step; another layout
    all of these                                             `reshard()`, `reset_iter_state()`, the end of the model
    in `eager.py`: of a call      unit, modes of autograd    the end of the call (`_Scope`)
    of a backward                 unit, modes of autograd    the backward of a gather; another backward (`recompute`)
    after forward                 unit, modes of autograd    backward, the next forward, new values (`AfterForward.end`)

[Note: resident]
A unit's parameters are *resident* while microbatches accumulate: the first graph that reads them has them launched as
one all_gather and waits where it needs them (`passes/read_resident.py`), later ones find them. The user chooses the
units (`set_reshard_after_backward(False)`), or the option `resident_gib` does, for as long as their gradients are not
reduced. The backward that reduces a unit's gradients takes the copies over and frees them.

A write to a parameter makes copies old. Writes of fused and foreach optimizers raise no version, so copies are dropped
before an optimizer of torch steps, and after, for a closure may gather again. For what torch does not count and no
optimizer does (`.data`, `torch._foreach_*`) the user calls `reshard`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fxshard import torch_private
from fxshard.ir import collectives
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.variant import Slots, in_order
from fxshard.runtime import profiler_ranges, streams
from fxshard.runtime.accumulation import Units

if TYPE_CHECKING:
    from fxshard.runtime.prefetcher import AllGatherRequest
    from fxshard.runtime.unit import Unit

_log = logging.getLogger(__name__)

Why = Literal["next", "listed", "asked", "stepped", "resident"]
"""Its graph came next the last time, a unit has listed it, the user has asked for it, an optimizer that `overlap_step`
knows has written it, or it stays."""


@dataclass(slots=True, eq=False)
class Gathered:
    """What one gather of a unit's parameters gives, to be waited for."""

    unit: Unit  # whose they are
    tensors: Mapping[Any, Tensor]  # by parameter, or by their place in a request
    why: Why  # it is kept
    # the request and the bits of its rows, where somebody may write to them unseen
    sent: tuple[AllGatherRequest, Tensor] | None = None
    epoch: int = field(init=False)  # of the unit, when it was launched

    def __post_init__(self) -> None:
        self.epoch = self.unit.epoch()

    @property
    def is_current(self) -> bool:
        """Whether the parameters have had no other values since."""
        return self.epoch == self.unit.epoch()


def wait_for(launched: Iterable[Tensor]) -> None:
    """Wait for what was launched outside of graphs."""
    with torch_private.unseen_by_policies():
        for tensor in launched:
            collectives.WAIT(tensor)


def drop(launched: Iterable[Tensor]) -> None:
    """Wait for what nobody reads; that it fails is no error, and another one may be under way."""
    try:
        wait_for(launched)
    except RuntimeError as error:
        _log.info("fxshard: a gather that nobody reads has failed: %s", error)


class UnshardedCache(dict[Hashable, Gathered]):
    """Gathered parameters of one model; see [Note: unsharded cache]. A taker pops them."""

    def __del__(self) -> None:
        """Wait for what is left of a model that is gone, unless the process ends or somebody traces."""
        if self and not sys.is_finalizing():
            with torch_private.without_modes():
                self.drop_if()

    def drop(self, *keys: Hashable) -> None:
        """Free what is there, if anything."""
        for key in keys:
            if key in self:
                drop(self.pop(key).tensors.values())

    def drop_if(self, which: Callable[[Gathered], bool] = lambda _: True) -> None:
        """Free all that is so."""
        self.drop(*[key for key, gathered in self.items() if which(gathered)])


def chosen_for(units: Units, reads: Slots, budget_bytes: int, *, trains: bool) -> frozenset[str]:
    """Keys of the units whose parameters come into a graph that runs now, within the user's `budget_bytes`."""
    found = {key: units[key] for key in reads if key in units}  # not what subgroups share
    return frozenset(key for key, unit in found.items() if _resident(unit) or (trains and _wants(unit, budget_bytes)))


def _wants(unit: Unit, budget_bytes: int) -> bool:
    if unit.world_size == 1:
        return False  # a parameter is a view of its shard
    is_kept = not unit.settings.reshard_after_backward
    return is_kept or (not unit.settings.sync and unit in unit.model.resident_in(budget_bytes))


def parameters_for(chosen: frozenset[str], units: Units, reads: Slots) -> list[Tensor]:
    """The parameters that a variant takes, in its order, each to be waited for; launches what is not there."""
    slots: dict[str, list[SlotIndex]] = {}
    for key, slot in in_order(chosen, reads):
        slots.setdefault(key, []).append(slot)
    gathered = {key: _resident(units[key]) or _launch_resident(units[key]) for key in slots}
    return [gathered[key].tensors[slot] for key, mine in slots.items() for slot in mine]


def _resident(unit: Unit) -> Gathered | None:
    """What is resident of a unit; copies of old values are dropped."""
    found = unit.model.unsharded.get(unit)
    if found is None or found.is_current:
        return found
    reshard_resident(unit)
    return None


def _launch_resident(unit: Unit) -> Gathered:
    flats = {i: shard.flat for i, shard in enumerate(unit.shards)}
    with (
        unit.agreed("resident", "all_gather", "all parameters"),
        profiler_ranges.of_unit(unit.fqn),
        torch.no_grad(),
        torch.inference_mode(False),
    ):
        tensors = collectives.launch_parameters(streams.on_device(flats, unit.plan), unit.plan)
    unit.model.watch_steps()
    found = unit.model.unsharded[unit] = Gathered(unit, tensors, "resident")
    return found


def unsharded_of(unit: Unit) -> dict[SlotIndex, Tensor]:
    """Return what is resident of a unit and has its values, waited for."""
    found = unit.model.unsharded.get(unit)
    return {slot: collectives.WAIT(each) for slot, each in found.tensors.items()} if found and found.is_current else {}


def is_resident(unit: Unit) -> bool:
    """Whether there are copies, of whichever values."""
    return unit in unit.model.unsharded


def reshard_resident(unit: Unit) -> None:
    """Free what is resident of a unit, if anything."""
    unit.model.unsharded.drop(unit)


def reshard_if_reduced(unit: Unit) -> None:
    """Free what is resident of a unit whose gradients are reduced now, unless the user wants it kept."""
    if unit.settings.sync and unit.settings.reshard_after_backward:
        reshard_resident(unit)


def units_that_fit(units: Sequence[Unit], budget_bytes: int) -> frozenset[Unit]:
    """The units to keep, by how much communication each byte saves, as far as the budget goes.

    One that backward would gather again saves two gathers in each microbatch, any other one. Of equal ones the first
    go first, so that all ranks choose alike.
    """
    chosen, left = set(), budget_bytes
    for unit in sorted(units, key=lambda unit: not unit.plan.regathers):
        if unit.world_size > 1 and unit.plan.unsharded_bytes <= left:
            chosen.add(unit)
            left -= unit.plan.unsharded_bytes
    return frozenset(chosen)
