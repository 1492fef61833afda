"""Reduced gradients that wait to be averaged over replicas: `set_requires_all_reduce(False)`.

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

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxshard import torch_private
from fxshard.errors import UnsupportedGraph
from fxshard.ir import collectives
from fxshard.ir.plan import UnitPlan
from fxshard.ir.variant import accumulator_dtype
from fxshard.runtime import profiler_ranges

if TYPE_CHECKING:
    from fxshard.runtime.unit import Unit


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
