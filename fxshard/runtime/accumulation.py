"""Gradients of microbatches that wait: where they are added up, and when they are reduced and averaged.

[Note: accumulators]
Accumulators belong to the unit, not to the graph that writes them: the last microbatch may run in another graph (a new
shape, a graph break), or not touch the unit at all. They are of the unsharded shapes, in the dtype in which they will
be reduced, allocated at the first gradient that waits and kept for the steps that follow.

[Note: replica sums]
A backward that is not to average over replicas runs a variant of its graph without the all_reduce, and what comes of
each flat is added up here: shards, where `no_sync` keeps whole gradients. The first backward that averages again runs
the same variant, and each flat is averaged when its gradient is handed over, by one all_reduce outside of the graph. A
backward does one or the other for all graphs of a unit, for autograd adds up what they give a flat.

Of an offloaded unit that is on the host, where autograd hands gradients over in a thread of its own, beside the one
that runs the graphs, and in an order that ranks do not share. So these are averaged when the backward has ended.

Source: FSDP2 `_fsdp_collectives.py` (`foreach_reduce`, `partial_reduce_output`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fxshard import torch_private
from fxshard.errors import UnsupportedGraph
from fxshard.ir import collectives
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.plan import UnitPlan
from fxshard.ir.variant import Slots, Variant, accumulator_dtype, in_order
from fxshard.runtime import profiler_ranges

if TYPE_CHECKING:
    from fxshard.runtime.unit import Unit

Units = Mapping[str, "Unit"]
"""By the keys that a graph's markers carry: the units of one call of it."""

Waiting = tuple[SlotIndex, ...]
"""Parameters of one unit with gradients that wait, in registration order."""

ALIGNMENT = 16
"""Bytes. On GPUs Inductor copies an input that begins elsewhere, and copies it back."""


class Accumulation:
    """What one unit has accumulated; see [Note: accumulators]."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.waiting: set[SlotIndex] = set()  # the parameters with gradients that were not reduced
        self._buffers: dict[int, Tensor] = {}  # by shard: all its parameters, one after the other
        self._epoch = 0

    def sums(self, slots: Iterable[SlotIndex]) -> list[Tensor]:
        """The accumulators of some parameters, zeros where nothing waits; refused if parameters have changed."""
        slots = list(slots)
        if self.waiting and self._epoch != self._unit.epoch():
            raise UnsupportedGraph(
                f"parameters of unit {self._unit.label!r} were changed while gradients of earlier microbatches "
                "waited to be reduced. Let the last backward before the optimizer step run outside of no_sync() (or "
                "with set_requires_gradient_sync(True)), or drop what waits with reset_iter_state()."
            )
        self._epoch = self._unit.epoch()
        views = {i: self._views(i) for i in sorted({shard for shard, _ in slots})}
        sums = {index: views[index[0]][index[1]] for index in slots}
        if stale := [total for index, total in sums.items() if index not in self.waiting]:
            with torch.no_grad():
                torch._foreach_zero_(stale)
        return list(sums.values())

    def _views(self, i: int) -> Sequence[Tensor]:
        shard, device = self._unit.shards[i].plan, self._unit.device
        dtype = accumulator_dtype(self._unit.plan, shard)
        step = ALIGNMENT // dtype.itemsize
        numels = [-(-slot.full_numel // step) * step for slot in shard.slots]
        found = self._buffers.get(i)
        with torch.no_grad(), torch.inference_mode(False):
            if found is None or (found.numel(), found.dtype, found.device) != (sum(numels), dtype, device):
                found = self._buffers[i] = torch.empty(sum(numels), dtype=dtype, device=device)
            parts = zip(found.split(numels), shard.slots, strict=True)
            return [part[: slot.full_numel].view(slot.shape) for part, slot in parts]

    def add(self, grads: Mapping[SlotIndex, Tensor]) -> None:
        """Add gradients, each of its parameter's shape, outside of compiled code."""
        with torch.no_grad():
            for total, grad in zip(self.sums(grads), grads.values(), strict=True):
                total.add_(grad)
        self.waiting.update(grads)
        self._unit.model.watch_steps()

    def finish(self, grads: Mapping[SlotIndex, Tensor], slots: Collection[SlotIndex]) -> dict[SlotIndex, Tensor]:
        """What is to be reduced of some parameters: `grads`, with what waits of them added."""
        if self.waiting.isdisjoint(slots):
            return dict(grads)
        self.add(grads)
        return self.take(sorted(self.waiting.intersection(slots)))

    def take(self, slots: Sequence[SlotIndex]) -> dict[SlotIndex, Tensor]:
        """What waits of some parameters, which is to be reduced now."""
        found = self.sums(slots)
        if self._unit.world_size == 1:  # nothing is sent: the sums themselves would become gradients
            found = [total.clone() for total in found]
        self.waiting.difference_update(slots)
        return dict(zip(slots, found, strict=True))

    def release(self) -> None:
        """Free the accumulators; nothing may wait in them."""
        self._buffers.clear()


def waiting_separately(
    units: Units, trained: Slots, candidates: Mapping[str, Collection[SlotIndex]]
) -> dict[str, Waiting]:
    """What is to be reduced by itself before a backward runs: of `candidates`, which FSDP2 reduces so, what waits."""
    found: dict[str, Waiting] = {}
    for key, slots in candidates.items():  # in an order that is the same on all ranks
        waiting = units[key].step.accumulation.waiting.intersection(slots, trained.get(key, ()))
        if waiting and units[key].settings.sync and _is_asked(units[key]):
            found[key] = tuple(sorted(waiting))
    return found


def variant_for(units: Units, trained: Slots, separate: Mapping[str, Waiting]) -> Variant:
    """Which backward of a graph is to run now; resident units are chosen elsewhere."""
    kept = {key for key in trained if not units[key].settings.sync}
    left = {
        key: units[key].step.accumulation.waiting.difference(separate.get(key, ())) for key in trained.keys() - kept
    }
    ended = {key for key, slots in left.items() if not slots.isdisjoint(trained[key])}
    # Of a unit that autograd asks no gradient of, the plain backward's is dropped.
    asked = {key for key in kept | ended if _is_asked(units[key])}
    return Variant(accumulates=frozenset(kept & asked), finishes=frozenset(ended & asked))


def _is_asked(unit: Unit) -> bool:
    return any(
        torch_private.will_run(get_gradient_edge(shard.flat).node) for shard in unit.shards if shard.plan.trainable
    )


def sums_for(which: Variant, units: Units, trained: Slots) -> list[Tensor]:
    """The accumulators that a variant takes, in its order."""
    slots: dict[str, list[SlotIndex]] = {}
    for key, slot in in_order(which.units, trained):
        slots.setdefault(key, []).append(slot)
    return [total for key, mine in slots.items() for total in units[key].step.accumulation.sums(mine)]


def note_run(which: Variant, units: Units, trained: Slots) -> None:
    """A variant has run: say what waits now."""
    for key in which.accumulates:
        units[key].step.accumulation.waiting.update(trained[key])
        units[key].model.watch_steps()
    for key in which.finishes:
        units[key].step.accumulation.waiting.difference_update(trained[key])


class ReplicaSums:
    """What one unit has reduced and not averaged over its replicas; see [Note: replica sums]."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._sums: dict[int, Tensor] = {}  # by shard
        self._slots: dict[int, set[int]] = {}  # the parameters with a gradient in it
        self._apart: dict[int | None, bool] = {}  # by backward
        self._epoch = 0
        self._ends = False  # a backward

    @property
    def waiting(self) -> bool:
        """Whether something is to be averaged yet."""
        return bool(self._sums)

    def defers_all_reduce(self) -> bool:
        """Whether the graphs of the running backward leave out the all_reduce."""
        if self._unit.plan.replicas == 1:
            return False
        return self._apart.setdefault(torch_private.backward_id(), not self._unit.settings.averages or self.waiting)

    def plan(self) -> UnitPlan:
        """The unit's plan for what is reduced outside of graphs."""
        return replace(self._unit.plan, all_reduces=False) if self.defers_all_reduce() else self._unit.plan

    def forget(self) -> None:
        """No backward runs: the next one decides anew."""
        self._apart.clear()

    def drop(self) -> None:
        """Forget what waits."""
        self._sums.clear()
        self._slots.clear()

    def take(self, shard: int, grad: Tensor, slots: Sequence[int]) -> tuple[Tensor, list[int]] | None:
        """Keep a reduced gradient of a flat that is not averaged yet, or return the mean, and for which parameters."""
        if self.waiting and self._epoch != self._unit.epoch():
            raise UnsupportedGraph(
                f"parameters of unit {self._unit.label!r} were changed while reduced gradients of earlier microbatches "
                "waited for their all_reduce. Let the last backward before the optimizer step run with "
                "set_requires_all_reduce(True), or drop what waits with reset_iter_state()."
            )
        self._epoch = self._unit.epoch()
        earlier, known = self._sums.pop(shard, None), self._slots.pop(shard, set()) | set(slots)
        with torch.no_grad():
            total = grad if earlier is None else earlier + grad
            settings = self._unit.settings
            if settings.averages and (self._ends or settings.offload is None):
                return self._averaged(shard, total), sorted(known)
            self._sums[shard], self._slots[shard] = total.clone() if earlier is None else total, known
        self._unit.model.watch_steps()
        return None

    def finish(self) -> None:
        """Average what waits: of flats to which the backward that ends now gave nothing, and of offloaded ones."""
        self._ends = True
        try:
            for shard in sorted(self._sums) if self._unit.settings.averages else ():
                flat, sink = self._unit.shards[shard].flat, self._unit.shards[shard].sink
                sink.expect(self._slots[shard])
                flat.grad = torch.zeros_like(self._sums[shard])
                sink.take(flat)
        finally:
            self._ends = False

    def _averaged(self, shard: int, total: Tensor) -> Tensor:
        unit, plan = self._unit, self._unit.plan
        rule = collectives.division_of(plan, accumulator_dtype(plan, plan.shards[shard]))
        what = f"the reduced gradients of shard {shard}"
        with unit.agreed("averaged", "all_reduce", what), profiler_ranges.of_unit(unit.fqn):
            averaged = collectives.all_reduce_now(total.to(unit.device), rule, plan.replicate_group)
            return averaged.to(total.device)
