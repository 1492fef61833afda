"""The backwards of one model, and what ends with the last one of a step.

[Note: the end of a step]
A unit that still waits when a backward ends which was to reduce it (`set_is_last_backward`) is reduced then, and what
is resident of it is freed. The units go in the order in which the model names them, so that all ranks go alike; and as
before a graph's collectives, the ranks compare what they are about to reduce (`agreement.py`).

While gradients wait or parameters are resident, an optimizer's step concerns us: it must not leave the first behind,
and the second would be old after it. A fused step raises no version by which one could tell afterwards, so we have
torch call us before it, but only for as long as there is something to see to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxshard.errors import UnsupportedGraph
from fxshard.ir import collectives, fake
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.order import Launch
from fxshard.runtime import agreement, ranges, resident

if TYPE_CHECKING:
    from fxshard.runtime.unit import Unit


@dataclass(eq=False)
class Microbatches:
    """The backwards of one model; see [Note: the end of a step].

    Attributes:
        units: of the model, in the order in which it names them.
        last: whether a backward that ends now is the last one of its step.
    """

    units: Sequence[Unit]
    last: bool = True
    _watched_backward: int | None = field(default=None, repr=False)
    _before_steps: weakref.finalize[..., Microbatches] | None = field(default=None, repr=False)
    _resident_in: dict[int, frozenset[Unit]] = field(default_factory=dict, repr=False)
    _reductions: dict[tuple[Unit, tuple[SlotIndex, ...]], Callable[[list[Unit]], None]] = field(
        default_factory=dict, repr=False
    )

    def backward_runs(self) -> None:
        """Called by the first graph of a backward: when the backward ends, see to what ends with it."""
        running = fake.backward_id()
        if running != self._watched_backward and self._before_steps is not None:
            self._watched_backward = running
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._watched_backward = None
        if self.last:
            self.reduce(unit for unit in self.units if unit.accumulation.sync)
        for unit in self.units:
            self.drop_resident(unit)
        self.rest()

    def reduce(self, units: Iterable[Unit]) -> None:
        """Reduce what waits in some units, and give their parameters their gradients."""
        for unit in units:
            if unit.accumulation.waiting:
                self._reduction_of(unit)([unit])
        self.rest()

    def _reduction_of(self, unit: Unit) -> Callable[[list[Unit]], None]:
        """What reduces the gradients of a unit that wait now, in agreement with the other ranks."""
        slots = tuple(sorted(unit.accumulation.waiting))
        if (unit, slots) not in self._reductions:
            names = ", ".join(unit.plan.shards[i].slots[j].fqn for i, j in slots)
            text = f"reduce_scatter of waiting gradients of {names} on group {unit.plan.reducing_group!r}"
            launch = Launch(unit.plan.reducing_group, text, "outside of graphs", "reduce_scatter", unit.fqn)
            self._reductions[unit, slots] = agreement.guard(_reduce, "flush", (launch,))
        return self._reductions[unit, slots]

    @staticmethod
    def drop_resident(unit: Unit) -> None:
        """Free what is resident of a unit whose gradients are reduced now, unless the user wants it kept."""
        if unit.accumulation.sync and not unit.resident.wanted:
            unit.resident.drop()

    def resident_in(self, budget_bytes: int) -> frozenset[Unit]:
        """The units whose parameters are kept while gradients accumulate, of a budget for the whole model."""
        if budget_bytes not in self._resident_in:
            self._resident_in[budget_bytes] = resident.within(self.units, budget_bytes)
        return self._resident_in[budget_bytes]

    def forget_choice(self) -> None:
        """A unit has changed: choose anew."""
        self._resident_in.clear()
        self._reductions.clear()

    def watch_steps(self) -> None:
        """Something waits or is resident: see to it before an optimizer steps."""
        if self._before_steps is None:
            self._before_steps = weakref.finalize(self, _Watch(weakref.ref(self)).remove)

    def rest(self) -> None:
        """Let optimizers step as they like, if nothing waits or is resident; outside of steps, where hooks may go."""
        if self._before_steps is not None and not any(u.accumulation.waiting or u.resident.holds for u in self.units):
            self._before_steps()
            self._before_steps = None

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to write its parameters.

        Raises:
            UnsupportedGraph: gradients of some of them wait to be reduced.
        """
        for unit in self._written_by(optimizer):
            if unit.accumulation.waiting:
                raise UnsupportedGraph(
                    f"an optimizer steps while gradients of unit {unit.fqn or 'root'!r} wait to be reduced: it would "
                    "leave them behind. Let the last backward before the step run outside of no_sync() (or with "
                    "set_requires_gradient_sync(True)), call reduce_waiting_gradients(), or drop what waits with "
                    "reset_iter_state()."
                )
            unit.resident.drop()

    def step_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has written its parameters: what a closure gathered meanwhile is old."""
        for unit in self._written_by(optimizer):
            unit.resident.drop()

    def _written_by(self, optimizer: torch.optim.Optimizer) -> list[Unit]:
        written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [unit for unit in self.units if any(id(member.parameter) in written for member in unit.members)]


class _Watch:
    """Hooks around all optimizers' steps, for one model."""

    def __init__(self, microbatches: weakref.ref[Microbatches]) -> None:
        def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (found := microbatches()) is not None:
                found.step_begins(optimizer)

        def ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (found := microbatches()) is not None:
                found.step_ends(optimizer)

        self._handles = (
            register_optimizer_step_pre_hook(torch.compiler.disable(begins)),
            register_optimizer_step_post_hook(torch.compiler.disable(ends)),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _reduce(units: list[Unit]) -> None:
    """Reduce what waits in one unit, and give the parameters their gradients."""
    (unit,) = units
    with torch.no_grad(), ranges.of_unit(unit.fqn):
        grads = unit.accumulation.finish(unit, {})
        for i, reduced in collectives.reduce_grads(grads, unit.plan).items():
            shard = unit.shards[i]
            shard.sink.expect(slot for index, slot in grads if index == i)
            shard.flat.grad = reduced
            shard.sink.take(shard.flat)
