"""The backwards of one model, and what ends with the last one of a step.

[Note: the end of a step]
A unit that still waits when a backward ends which was to reduce it (`set_is_last_backward`) is reduced then, and what
is resident of it is freed. The units go in the order in which the model names them, so that all ranks go alike; and as
before a graph's collectives, the ranks compare what they are about to reduce (`agreement.py`).

An optimizer's step concerns us: it must not leave waiting gradients behind, resident parameters are old after it, and
so is every forward whose backward would gather again. Foreach and fused steps raise no version of a DTensor by which
one could tell afterwards, so torch calls us around each step. In a step that is itself compiled the call vanishes (such
a step raises versions), unless something waits or is resident.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxshard.errors import UnsupportedGraph
from fxshard.ir import collectives, fake
from fxshard.ir.order import Launch
from fxshard.runtime import agreement, ranges, resident
from fxshard.runtime.accumulation import Waiting

if TYPE_CHECKING:
    from fxshard.runtime.unit import FlatShard, Unit

    Reduced = tuple[FlatShard, Tensor, list[int]]
    Reduction = Callable[[list[Unit]], list[Reduced]]


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
    _watch: _Watch = field(init=False, repr=False)
    _resident_in: dict[int, frozenset[Unit]] = field(default_factory=dict, repr=False)
    _reductions: dict[tuple[Unit, Waiting], Reduction] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Watch the optimizers' steps from now on, for as long as the model lives."""
        self._watch = _Watch(weakref.ref(self))
        weakref.finalize(self, self._watch.remove).atexit = False

    def backward_runs(self) -> None:
        """Called by the first graph of a backward: when the backward ends, see to what ends with it."""
        for unit in self.units:
            if unit.after_forward is not None:
                unit.after_forward.close()
        running = fake.backward_id()
        if running != self._watched_backward and self._watch.holds:
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
            if waiting := tuple(sorted(unit.accumulation.waiting)):
                with torch.no_grad():
                    for shard, grad, slots in self._reduction_of(unit, waiting)([unit]):
                        shard.sink.expect(slots)
                        shard.flat.grad = grad
                        shard.sink.take(shard.flat)
        self.rest()

    def reduce_separately(self, unit: Unit, slots: Waiting) -> None:
        """Reduce what waits of some parameters, right before a backward that gives them a gradient."""
        for shard, grad, _ in self._reduction_of(unit, slots)([unit]):
            shard.sink.keep(grad)

    def _reduction_of(self, unit: Unit, slots: Waiting) -> Reduction:
        """What reduces gradients of a unit that wait now, in agreement with the other ranks."""
        if (unit, slots) not in self._reductions:
            names = ", ".join(unit.plan.shards[i].slots[j].fqn for i, j in slots)
            text = f"reduce_scatter of waiting gradients of {names} on group {unit.plan.reducing_group!r}"
            launch = Launch(unit.plan.reducing_group, text, "outside of graphs", "reduce_scatter", unit.fqn)
            self._reductions[unit, slots] = agreement.guard(functools.partial(_reduce, slots=slots), "flush", (launch,))
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

    def hold(self) -> None:
        """Something waits or is resident: see to it before an optimizer steps."""
        self._watch.holds = True

    def rest(self) -> None:
        """Let optimizers step as they like, if nothing waits or is resident."""
        self._watch.holds = any(unit.accumulation.waiting or unit.resident.holds for unit in self.units)

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
        """An optimizer has written its parameters: forwards are void now, and what a closure gathered is old."""
        for unit in self._written_by(optimizer):
            unit.generation += 1
            unit.resident.drop()

    def _written_by(self, optimizer: torch.optim.Optimizer) -> list[Unit]:
        written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [unit for unit in self.units if any(id(p) in written for m in unit.members for p in m.registered())]


class _Watch:
    """Hooks around all optimizers' steps, for one model.

    Attributes:
        holds: whether anything of the model waits or is resident. Dynamo guards on it where a step is compiled.
    """

    def __init__(self, microbatches: weakref.ref[Microbatches]) -> None:
        self.holds = False
        self._microbatches = microbatches
        self._handles = register_optimizer_step_pre_hook(self.begins), register_optimizer_step_post_hook(self.ends)

    def begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.holds:
            _step_begins_eagerly(self, optimizer)

    def ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.holds or not torch.compiler.is_compiling():
            _step_ends_eagerly(self, optimizer)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if (found := self._microbatches()) is not None:
            found.step_begins(optimizer)

    def step_ends(self, optimizer: torch.optim.Optimizer) -> None:
        if (found := self._microbatches()) is not None:
            found.step_ends(optimizer)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


_step_begins_eagerly = torch.compiler.disable(_Watch.step_begins)
_step_ends_eagerly = torch.compiler.disable(_Watch.step_ends)


def _reduce(units: list[Unit], slots: Waiting) -> list[Reduced]:
    """Reduce what waits of some parameters of one unit."""
    (unit,) = units
    with torch.no_grad(), ranges.of_unit(unit.fqn):
        reduced = collectives.reduce_grads(unit.accumulation.take(unit, slots), unit.plan)
    return [(unit.shards[i], grad, [slot for index, slot in slots if index == i]) for i, grad in reduced.items()]
