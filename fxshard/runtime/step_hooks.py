"""The backwards of one model, and what ends with the last one of a step.

[Note: the end of a step]
A unit that still waits when a backward ends which was to reduce it (`set_is_last_backward`) is reduced then, and what
is resident of it is freed. The units go in the order in which the model names them, so that all ranks go alike; and as
before a graph's collectives, the ranks compare what they are about to reduce (`rank_check.py`). At the end of every
backward they look back at what all of them ran.

An optimizer's step concerns us: it must not leave waiting gradients behind, resident parameters are old after it, and
so is every forward whose backward would gather again. Foreach and fused steps raise no version of a DTensor by which
one could tell afterwards, so torch calls us around each step. In a step that is itself compiled the call vanishes (such
a step raises versions), unless something waits or is resident.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Adafactor, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from fxshard import torch_private
from fxshard.errors import ConfigError, RankMismatchError, UnsupportedGraph
from fxshard.ir import collectives
from fxshard.runtime import profiler_ranges, rank_check, streams, unsharded_cache
from fxshard.runtime.accumulation import Waiting
from fxshard.runtime.late_gradients import BackwardMark, LateGradients
from fxshard.runtime.parameters import lay_as_parameters
from fxshard.runtime.prefetcher import Prefetcher
from fxshard.runtime.unsharded_cache import UnshardedCache
from fxshard.unit_settings import BackwardSettings

if TYPE_CHECKING:
    from fxshard.runtime.flat_shard import FlatShard
    from fxshard.runtime.unit import Unit

    ReducedFlat = tuple[FlatShard, Tensor, list[int]]


_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ModelContext:
    """What the units of one model share, and its backwards; see [Note: the end of a step]."""

    units: Sequence[Unit]  # in the order in which the model names them
    late: LateGradients = field(default_factory=LateGradients)  # reduced gradients that have not arrived yet
    unsharded: UnshardedCache = field(default_factory=UnshardedCache, repr=False)
    prefetcher: Prefetcher = field(init=False, repr=False)
    after_first_call: Callable[[], None] | None = None  # runs after a compiled graph, until it has succeeded
    settings: BackwardSettings = field(default_factory=BackwardSettings)
    _begun: int | None = field(default=None, repr=False)
    _unended: set[int] = field(default_factory=set, repr=False)  # backwards that have begun, and leave sums behind
    _seen: tuple[int, int] = field(default=(0, 0), repr=False)  # the last backward, and compilations before it
    _lost: bool = field(default=False, repr=False)  # whether a forward since then had no backward
    _ran_last: str = field(default="", repr=False)  # outside of graphs
    _ran_next: dict[str, tuple[str, str]] = field(default_factory=dict, repr=False)  # run -> the next, and its sizes
    _resharded_in: int | None = field(default=None, repr=False)
    _resident_in: dict[int, frozenset[Unit]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Watch the optimizers' steps from now on, for as long as the model lives."""
        self.prefetcher, hooks = Prefetcher(self.unsharded), step_hooks()
        hooks.models.add(self)
        hooks.lays |= any(member.settings.dim for unit in self.units for member in unit.members)

    def watch_backward(self, result: object) -> None:
        """See the backward of what a forward gives begin: also one that fails before it comes to a graph."""
        foresees, is_summed = True in self.prefetcher.first_rows, self._leaves_sums
        if is_summed or foresees:
            awaited = _AwaitedBackward(self, counts=is_summed and torch_private.backward_id() is None)
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    graphs = [weakref.ref(each) for each in torch_private.compiled_nodes(tensor)] if foresees else []
                    tensor.register_hook(functools.partial(_begin_backward_eagerly, awaited, graphs))

    def backward_begins(self, graphs: Iterable[weakref.ref[Any]]) -> None:
        """At the gradient of a result, with the backwards of graphs behind it: some backwards do not come to them."""
        self.backward_runs(of_forward=False)
        if any(torch_private.will_run(node) for graph in graphs if (node := graph()) is not None):
            self.prefetcher.prefetch_first()

    @property
    def _leaves_sums(self) -> bool:
        return self.holds or not all(unit.settings.sync for unit in self.units)

    def backward_runs(self, *, of_forward: bool = True) -> None:
        """Called by the graphs of a backward: at the first one see to what begins, and later to what ends with it.

        `of_forward`: the backward of a forward, not of what was read after it alone.
        """
        running = torch_private.backward_id()
        if running is not None:
            self._require_none_lost(now := (running, torch_private.compilations()))
            self._seen = now
        if of_forward and running != self._resharded_in:
            self._resharded_in = running
            for unit in self.units:
                unit.step.after_forward.end()
        if running == self._begun:
            return
        self._begun = running
        if running is not None:
            if self._leaves_sums:
                self._unended.add(running)
            torch_private.when_backward_ends(functools.partial(self._backward_ends, running, self.late.begin(running)))

    def _backward_ends(self, which: int, mark: BackwardMark) -> None:
        self.late.end(which)
        self.prefetcher.end_backward(which)
        if which in self._unended:
            self.end_step(is_last=self.settings.is_last and not self.settings.ended_by_hand)
            self._unended.discard(which)
        self.look_back()

    def goes_another_way(self, run: str, sizes: str) -> bool:
        """Whether what runs outside of graphs, a text of it, has other sizes than what came here the last time.

        Collectives of unlike sizes that meet may end a process before ranks are told that they differ.
        """
        usual = self._ran_next.get(self._ran_last)
        self._ran_next[self._ran_last], self._ran_last = (run, sizes), run
        return usual is not None and usual[0] != run and usual[1] != sizes

    def look_back(self) -> None:
        """Let ranks that ran different units be told before an optimizer steps; behind fake tensors there are none."""
        if any(unit.is_fake for unit in self.units):
            return
        groups = {name for unit in self.units for name in unit.plan.groups}
        with self.forgetting():
            rank_check.look_back(groups, are_over=all(unit.device.type == "cpu" for unit in self.units))
        self.prefetcher.ranks_agree()

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Forget what the prefetcher has seen where ranks have gone different ways: all must guess alike again."""
        try:
            yield
        except RankMismatchError:
            self.prefetcher.forget()
            raise

    def require_whole_sums(self) -> None:
        """Outside of a backward, raise if what waits has only a part of one that failed, and drop what is late."""
        if torch_private.backward_id() is not None:
            return
        self.late.drop()
        if not self._unended:
            return
        self._require_nothing_waits()
        self._unended.clear()

    def forward_is_lost(self) -> None:
        """A forward that was to leave sums behind is gone, and its backward never came to the model."""
        self._lost = True

    def _require_none_lost(self, now: tuple[int, int]) -> None:
        """Raise if a backward before the one that runs failed in the loss, before it came to the model, and sums wait.

        Backwards are numbered: there was one that this model has not seen, and a forward that had none. A compilation
        runs backwards, too: then there is only a warning.
        """
        if self._lost and now[1] == self._seen[1] and now[0] > self._seen[0] + 1:
            self._require_nothing_waits()
        elif self._lost and now[1] > self._seen[1] and self._waiting():
            _log.warning(
                "fxshard: a forward had no backward while gradients waited to be reduced. If its step was given up, "
                "after an error in the loss, drop them where it is caught: model.reset_iter_state()."
            )
        self._lost = False

    def _waiting(self) -> list[str]:
        return [unit.label for unit in self.units if unit.step.accumulation.waiting or unit.step.replica_sums.waiting]

    def _require_nothing_waits(self) -> None:
        if waiting := self._waiting():
            raise UnsupportedGraph(
                "a backward failed (out of memory, an exception in a hook) while gradients waited to be reduced, and "
                f"would be added to the next step's: units {', '.join(map(repr, waiting))}. Give the step up on all "
                "ranks: model.reset_iter_state() and optimizer.zero_grad() where the exception is caught. "
                "If none failed: run forwards that have no backward under torch.no_grad()."
            )

    def drop(self, units: Iterable[Unit]) -> None:
        """Forget the gradients of some units that wait, and what a backward that failed has left."""
        self.late.drop()
        self._lost = False
        for unit in units:
            unit.step.accumulation.waiting.clear()
            unit.step.replica_sums.drop()
        self.stop_watching_if_idle()

    def end_step(self, *, is_last: bool = True) -> None:
        """Do what the end of a backward does; by default that of the last one of a step."""
        if is_last:
            self.reduce(unit for unit in self.units if unit.settings.sync)
        for unit in self.units:
            if is_last or unit.settings.offload is not None:  # on the host nothing is averaged before
                unit.step.replica_sums.finish()
        for unit in self.units:
            unsharded_cache.reshard_if_reduced(unit)
        self.stop_watching_if_idle()

    def reduce(self, units: Iterable[Unit]) -> None:
        """Reduce what waits in some units, and give their parameters their gradients."""
        for unit in units:
            if waiting := tuple(sorted(unit.step.accumulation.waiting)):
                with torch.no_grad():
                    for shard, grad, slots in _reduce(unit, waiting):
                        shard.sink.expect(slots)
                        shard.flat.grad = grad
                        shard.sink.take(shard.flat)
        self.stop_watching_if_idle()

    @staticmethod
    def reduce_separately(unit: Unit, slots: Waiting) -> None:
        """Reduce what waits of some parameters, right before a backward that gives them a gradient."""
        for shard, grad, _ in _reduce(unit, slots):
            shard.sink.keep(grad)

    def resident_in(self, budget_bytes: int) -> frozenset[Unit]:
        """The units whose parameters are kept while gradients accumulate, of a budget for the whole model."""
        if budget_bytes not in self._resident_in:
            self._resident_in[budget_bytes] = unsharded_cache.units_that_fit(self.units, budget_bytes)
        return self._resident_in[budget_bytes]

    def forget_choice(self, *, is_other: bool) -> None:
        """A unit has changed: choose anew; if it `is_other` than before, what the prefetcher has seen is old."""
        self._resident_in.clear()
        if is_other:
            self.prefetcher.forget()

    @property
    def holds(self) -> bool:
        """Whether anything of the model waits or is resident."""
        return any(
            unit.step.accumulation.waiting or unit.step.replica_sums.waiting or unsharded_cache.is_resident(unit)
            for unit in self.units
        )

    @staticmethod
    def watch_steps() -> None:
        """Something waits or is resident: see to it before an optimizer steps."""
        step_hooks().holds = True

    @staticmethod
    def stop_watching_if_idle() -> None:
        """Let optimizers step as they like, if nothing of any model waits or is resident."""
        hooks = step_hooks()
        hooks.holds = any(model.holds for model in list(hooks.models))

    def step_begins(self, written: Collection[int]) -> None:
        """An optimizer is about to write parameters, whose ids these are; in a backward gradients may still be late.

        UnsupportedGraph if gradients of some of them wait to be reduced.
        """
        self.late.arrive(keep=0)
        for unit in self._units_of(written):
            if unit.step.accumulation.waiting:
                raise UnsupportedGraph(
                    f"an optimizer steps while gradients of unit {unit.label!r} wait to be reduced: it would "
                    "leave them behind. Let the last backward before the step run outside of no_sync() (or with "
                    "set_requires_gradient_sync(True)), call reduce_waiting_gradients(), or drop what waits with "
                    "reset_iter_state()."
                )
            if unit.step.replica_sums.waiting:
                raise UnsupportedGraph(
                    f"an optimizer steps while reduced gradients of unit {unit.label!r} wait for their all_reduce. Let "
                    "the last backward before the step run with set_requires_all_reduce(True), or drop what waits with "
                    "reset_iter_state()."
                )
            unsharded_cache.reshard_resident(unit)

    def step_ends(self, written: Collection[int]) -> list[Unit]:
        """An optimizer has written parameters, of the units that are returned: forwards are void now."""
        units = self._units_of(written)
        for unit in units:
            unit.generation += 1
            unsharded_cache.reshard_resident(unit)
        return units

    def _units_of(self, written: Collection[int]) -> list[Unit]:
        return [unit for unit in self.units if any(id(p) in written for m in unit.members for p in m.registered())]


class _AwaitedBackward:
    """Lives as long as the autograd graph of a forward, and tells its model if that goes without a backward."""

    def __init__(self, model: ModelContext, *, counts: bool) -> None:
        self.model, self._is_awaited = model, counts

    def begins(self, graphs: Iterable[weakref.ref[Any]], _: Tensor) -> None:
        self._is_awaited = False
        self.model.backward_begins(graphs)

    def __del__(self) -> None:
        if self._is_awaited:
            self.model.forward_is_lost()


# A whole train step may be compiled: then Dynamo is on during backward, and must leave this alone.
_begin_backward_eagerly = torch.compiler.disable(_AwaitedBackward.begins)


class StepHooks:
    """The hooks around all optimizers' steps, one pair for all models."""

    def __init__(self) -> None:
        # the optimizers whose steps launch the first gather of the next forward.
        self.overlapped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.models: weakref.WeakSet[ModelContext] = weakref.WeakSet()  # that live
        # whether anything of any model waits or is resident. Dynamo guards on it where a step is compiled.
        self.holds = False
        # whether a model has had parameters that lie in another memory order than FSDP2's: [Note: memory order].
        self.lays = False

    def begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called by torch before each step."""
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        lays = self.lays and (not torch.compiler.is_compiling() or is_fused)
        in_backward = not torch.compiler.is_compiling() and torch_private.backward_id() is not None
        if self.holds or lays or in_backward or _needs_whole(optimizer):
            _step_begins_eagerly(self, optimizer)

    def ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called by torch after each step."""
        if self.holds or not torch.compiler.is_compiling():
            _step_ends_eagerly(self, optimizer)

    def read_first(self) -> set[int]:
        """The ids of the parameters that the forwards of all models need whole before they compute anything."""
        units = {model.units[0].model.prefetcher.first for model in list(self.models) if model.units} - {None}
        return {id(member.parameter) for unit in units for member in cast("Unit", unit).members}

    def names(self) -> dict[int, str]:
        """The names of the parameters of all models, by their ids."""
        members = [member for model in list(self.models) for unit in model.units for member in unit.members]
        return {id(parameter): member.fqn for member in members for parameter in member.registered()}

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to write the parameters in its groups."""
        if self.lays:
            lay_as_parameters(optimizer)
        written = _written_by(optimizer)
        if _needs_whole(optimizer):
            _refuse_shards(optimizer, [unit for model in list(self.models) for unit in model.units], written)
        for model in list(self.models):
            model.step_begins(written)

    def step_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """It has written them."""
        written = _written_by(optimizer)
        stepped = [units for model in list(self.models) if (units := model.step_ends(written))]
        if optimizer in self.overlapped:
            # The models are in no order, but that of their parameters is the same on all ranks.
            for units in sorted(stepped, key=lambda units: _place_of(units[0], written)):
                units[0].model.prefetcher.launch_after_step(units)


_step_begins_eagerly = torch.compiler.disable(StepHooks.step_begins)
_step_ends_eagerly = torch.compiler.disable(StepHooks.step_ends)


@functools.cache
def step_hooks() -> StepHooks:
    """Registered with the first model, and never removed: the garbage collector may come while torch calls hooks."""
    hooks = StepHooks()
    register_optimizer_step_pre_hook(hooks.begins)
    register_optimizer_step_post_hook(hooks.ends)
    return hooks


def _needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, Adafactor | Rprop) or type(optimizer).__name__ == "Adafactor"  # of transformers


def _refuse_shards(optimizer: torch.optim.Optimizer, units: Iterable[Unit], written: Collection[int]) -> None:
    """Raise if an Adafactor or Rprop would step sharded parameters: torch's Adafactor takes norms of a rank's part.

    Matrices are errors of torch's in every Adafactor, as is Rprop; that of `transformers` steps vectors as it should.
    """
    dims = 1 if isinstance(optimizer, Adafactor | Rprop) else 2
    members = [member for unit in units for member in unit.members if id(member.parameter) in written]
    if found := [m.fqn for m in members if m.parameter.dim() >= dims and m.parameter.grad is not None]:
        raise ConfigError(
            f"{type(optimizer).__name__} ({type(optimizer).__module__}) cannot step sharded parameters: "
            f"{', '.join(found)}. It needs whole ones: use fxshard.whole_matrices(optimizer)."
        )


def _place_of(unit: Unit, written: Mapping[int, int]) -> int:
    return min(written[id(p)] for member in unit.members for p in member.registered() if id(p) in written)


def _written_by(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Map the id of each parameter of an optimizer -> its place in it."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {id(parameter): place for place, parameter in enumerate(parameters)}


def _reduce(unit: Unit, slots: Waiting) -> list[ReducedFlat]:
    names = ", ".join(unit.plan.shards[i].slots[j].fqn for i, j in slots)
    with (
        unit.agreed("waiting", "reduce_scatter", f"waiting gradients of {names}", slots),
        profiler_ranges.of_unit(unit.fqn),
        torch.no_grad(),
    ):
        reduced = collectives.reduce_grads(unit.step.accumulation.take(slots), unit.step.replica_sums.plan())
        reduced = streams.on_host(reduced, unit.plan)
    return [(unit.shards[i], grad, [slot for index, slot in slots if index == i]) for i, grad in reduced.items()]
