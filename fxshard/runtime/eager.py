"""Parameters outside compiled graphs: gather a unit once per call, hand out its parameters, reduce once.

[Note: inside a forward]
`module.weight` is the DTensor shard for everybody but the forward: a stray read must not launch a collective on one
rank only. "Inside a forward" means inside the call of any sharded unit on this thread (modules read each other's
weights), or inside a backward (activation checkpointing runs forwards again there).

[Note: after a forward]
A loss may read a weight (`fused_cross_entropy(hidden, model.head.weight, labels)`). FSDP2's root, and every unit that
does not reshard after forward, is unsharded then, until its backward. So here too: `module.weight` gives the unsharded
parameter, whose gradient is reduced in its own backward. It is gathered at the first read; the ranks compare that they
all read, as before a graph (`rank_check.py`). The backward of the forward, the next forward with gradients and any
change of the parameters end it; forwards without gradients leave it as it is, so a loop that generates gathers once.
It is a copy: a write to it, a hook on it or a new `requires_grad` would be lost, and is an error when it ends.
`module.parameters()`, `state_dict()` and `module.get_parameter(name)` always give the DTensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fxshard import torch_private
from fxshard.errors import InvariantError, UnsupportedGraph
from fxshard.ir import collectives, writes
from fxshard.ir.collectives import SlotIndex
from fxshard.runtime import host_copies, profiler_ranges
from fxshard.runtime.flat_shard import home_of
from fxshard.runtime.late_gradients import Reduction
from fxshard.runtime.parameters import ParameterRef

if TYPE_CHECKING:
    from fxshard.runtime.unit import Unit

Parameters = dict[SlotIndex, Tensor]

_MAX_LATE = 1
"""How many units may have reductions in flight when one of gradients outside of graphs is launched, as in FSDP2."""

_RETURNED = "_fxshard_parameter"
"""Attribute of a gathered parameter that a graph has returned: its FQN."""


class _Watched(NamedTuple):
    fqn: str
    value: Tensor
    version: int
    requires_grad: bool


class _Scope:
    """One call of a unit's module: what was gathered in it, by unit and autograd mode."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units  # that the module was made into
        # parameters, by unit, grad mode and inference mode.
        self.gathered: dict[tuple[int, bool, bool], Parameters] = {}
        self.watched: list[_Watched] = []  # what must stay as it was gathered

    def parameters_of(self, unit: Unit, *, after_forward: bool = False) -> Parameters:
        key = (id(unit), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if key not in self.gathered:
            self.gathered[key] = gather_unit(unit, after_forward=after_forward)
            for (i, j), value in self.gathered[key].items():
                self.watch(unit.plan.shards[i].slots[j].fqn, value)
        return self.gathered[key]

    def watch(self, fqn: str, value: Tensor) -> None:
        if not value.is_inference():
            self.watched.append(_Watched(fqn, value, value._version, value.requires_grad))

    def require_unchanged(self) -> None:
        changed = [each.fqn for each in self.watched if each.value._version != each.version]
        if changed:
            names = ", ".join(dict.fromkeys(changed))
            raise UnsupportedGraph(f"unsharded parameters were changed in place: {names}. {writes.LOST_WRITE}")

    def require_unmarked(self) -> None:
        marked = [
            each.fqn
            for each in self.watched
            if each.value._backward_hooks or each.value.requires_grad != each.requires_grad
        ]
        if marked:
            names = ", ".join(dict.fromkeys(marked))
            raise UnsupportedGraph(
                f"unsharded parameters got hooks or another requires_grad: {names}. They would be lost with the "
                "gathered copy. Set them on model.get_parameter(name)."
            )


class Running(NamedTuple):
    """What this thread runs: the n-th outermost call of a sharded module, or a backward."""

    is_backward: bool
    number: int


class _Scopes(threading.local):
    """The running calls of this thread, outermost first, and what the running backward has gathered again."""

    def __init__(self) -> None:
        self.stack: list[_Scope] = []
        self.calls = 0  # outermost ones so far
        self.recompute: tuple[int, _Scope] | None = None


_scopes = _Scopes()


class AfterForward:
    """A unit that does not reshard after forward, between its forward and its backward: see [Note: after a forward]."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._epoch: int | None = None
        self._scope = _Scope(())

    def begin(self) -> None:
        """A forward has ended."""
        epoch = self._unit.epoch()
        if self._epoch != epoch or torch.is_grad_enabled():
            self.end()
            self._epoch = epoch

    def end(self) -> None:
        """A backward begins, or values change: forget the unsharded parameters."""
        if self._epoch is not None:
            self._epoch, scope, self._scope = None, self._scope, _Scope(())
            scope.require_unchanged()
            scope.require_unmarked()

    @property
    def gathered(self) -> Iterable[tuple[tuple[int, bool, bool], Parameters]]:
        """What was read and has the unit's values."""
        return self._scope.gathered.items() if self._epoch == self._unit.epoch() else ()

    def parameter(self, slot: SlotIndex) -> Tensor | None:
        """The unsharded parameter, `None` if it is sharded."""
        if self._epoch is not None and self._epoch != self._unit.epoch():
            self.end()
        if self._epoch is None:
            return None
        with torch.inference_mode(False), torch.enable_grad():
            return self._scope.parameters_of(self._unit, after_forward=True)[slot]


def forward_ended(units: Iterable[Unit]) -> None:
    """The outermost call of a model has given its result: what it does not reshard may be read until its backward.

    Where no backward will come, the ranks look back here.
    """
    if len(_scopes.stack) > 1 or torch_private.backward_id() is not None:
        return
    units = tuple(units)
    for model in () if torch.is_grad_enabled() else dict.fromkeys(unit.model for unit in units):
        model.look_back()
    for unit in units:
        if not unit.plan.reshard_after_forward:
            unit.step.after_forward.begin()


def enter_call(units: Sequence[Unit]) -> None:
    """A module that these units were made for starts its call; `leave_call` must follow, also after an error."""
    _scopes.calls += not _scopes.stack
    _scopes.stack.append(_Scope(units))


def leave_call() -> None:
    """The innermost call ends; what it gathered lives on only where autograd saved it, or may be read after forward."""
    _scopes.stack.pop().require_unchanged()


def note_returned(value: Tensor, fqn: str) -> None:
    """A graph gives out a gathered parameter (a graph break comes between its read and its use)."""
    setattr(value, _RETURNED, fqn)
    if _scopes.stack:
        _scopes.stack[-1].watch(fqn, value)


def returned_names(values: Sequence[object]) -> dict[int, str]:
    """Map the index of each value that is a gathered parameter which a graph has given out -> its FQN."""
    return {
        i: fqn for i, value in enumerate(values) if isinstance(value, Tensor) and (fqn := getattr(value, _RETURNED, ""))
    }


def inside_call(depth: int = 1) -> bool:
    """Whether the caller runs inside the call of a sharded module, or of so many."""
    return len(_scopes.stack) >= depth


def inside_forward() -> bool:
    """See [Note: inside a forward]."""
    return bool(_scopes.stack) or torch_private.backward_id() is not None


def running() -> Running | None:
    """What this thread runs now, `None` for nothing of ours."""
    backward = torch_private.backward_id()
    if backward is not None:
        return Running(True, backward)
    return Running(False, _scopes.calls) if _scopes.stack else None


def read(ref: ParameterRef) -> Tensor:
    """The unsharded parameter, gathered at the first read in the running call of its unit."""
    home = home_of(ref.flat)
    if home is None:
        raise InvariantError("a parameter reference points to a tensor that is not a flat of any unit.")
    slot = home.shard, ref.slot
    return _scope_for(home.unit).parameters_of(home.unit)[slot]


def read_after_forward(ref: ParameterRef, registered: Tensor | None) -> Tensor | None:
    """The unsharded parameter of a unit that is between forward and backward, `None` if it is sharded.

    Also `None` where the module has another parameter `registered` than the unit gathered: forward ran with other
    values (`torch.func.functional_call`), or the parameter was replaced since.
    """
    home = home_of(ref.flat)
    if home is None or home.unit.shards[home.shard].members[ref.slot].parameter is not registered:
        return None
    return home.unit.step.after_forward.parameter((home.shard, ref.slot))


def _scope_for(unit: Unit) -> _Scope:
    """The innermost call of the unit itself, else the innermost call, else the running backward's recomputation."""
    for scope in reversed(_scopes.stack):
        if unit in scope.units:
            return scope
    if _scopes.stack:
        return _scopes.stack[-1]
    backward = torch_private.backward_id()
    if backward is None:
        raise InvariantError("an unsharded parameter was asked for outside of any forward or backward.")
    if _scopes.recompute is None or _scopes.recompute[0] != backward:
        _scopes.recompute = (backward, _Scope(()))
    return _scopes.recompute[1]


def unsharded_of(unit: Unit) -> Parameters:
    """Return what is gathered of a unit in a running call, or between its forward and its backward; nothing else."""
    running = [each for scope in _scopes.stack for each in scope.gathered.items() if each[0][0] == id(unit)]
    return {
        slot: value for _, values in (*running, *unit.step.after_forward.gathered) for slot, value in values.items()
    }


def gather_unit(unit: Unit, *, after_forward: bool = False) -> Parameters:
    """All parameters of a unit in one launch, differentiable with respect to its flats, also for a later read."""
    index = [(i, j) for i, shard in enumerate(unit.shards) for j in range(len(shard.members))]
    flats = [shard.flat for shard in unit.shards]
    when = "after forward" if after_forward else "outside of graphs"
    agreed = unit.agreed("read", "all_gather", f"all parameters, read {when},")
    are_real = not unit.is_fake  # else there are no ranks, and the trace is ours
    with agreed if are_real else nullcontext(), torch_private.outside_transforms(are_real):
        values = _UnshardUnit.apply(unit, index, after_forward, *flats)  # type: ignore[no-untyped-call]
    members = [unit.shards[i].members[j] for i, j in index]
    return {slot: member.read_from(value) for slot, member, value in zip(index, members, values, strict=True)}


class _UnshardUnit(torch.autograd.Function):
    """all_gather forward, reduce_scatter backward: the collectives of `ir/collectives.py`, run as they are."""

    @staticmethod
    def forward(
        ctx: Any, unit: Unit, index: list[SlotIndex], after_forward: bool, *flats: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.unit, ctx.index, ctx.after_forward, ctx.version = unit, index, after_forward, unit.version()
        ctx.set_materialize_grads(False)
        with profiler_ranges.of_unit(unit.fqn):
            shards = host_copies.on_device(dict(enumerate(flats)), unit.plan)
            reads = [(i, j) for i, shard in unit.plan.gathered for j in range(len(shard.slots))]
            segments, launched = collectives.launch_unshard(shards, unit.plan, reads)
        unit.model.prefetcher.prefetch_first()
        with profiler_ranges.of_wait(unit.fqn):
            parameters = collectives.parameters_in(launched, unit.plan, segments, reads)
        gathered = dict(zip(reads, parameters, strict=True))
        unsharded = unit.unsharded_of(gathered)
        values = [unsharded[slot] for slot in index]
        frozen = [v for v, (i, _) in zip(values, index, strict=True) if not unit.shards[i].plan.trainable]
        ctx.mark_non_differentiable(*frozen)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        unit: Unit = ctx.unit
        unit.require_version(ctx.version)
        written = {slot: grad for slot, grad in zip(ctx.index, grads, strict=True) if grad is not None}
        _scopes.recompute = None
        unit.model.backward_runs(of_forward=not ctx.after_forward)
        if written and not unit.settings.sync:
            unit.step.accumulation.add(written)
            written = {}
        if not written:
            return (None, None, None, *(None for _ in unit.shards))
        written = unit.step.accumulation.finish(written)
        if unit.settings.reduces_unused:
            written = _with_zeros(written, unit)
        for i, j in written:
            unit.shards[i].sink.expect((j,))
        return (None, None, None, *_reduce(unit, written))


def _reduce(unit: Unit, written: Parameters) -> list[Tensor | None]:
    """Launch the reduction of gradients; return those of the unit's shards, `None` where the runtime gives them later.

    See [Note: late gradients] in `late_gradients.py`.
    """
    names, mean = ", ".join(unit.plan.shards[i].slots[j].fqn for i, j in written), unit.step.replica_sums.plan()
    agreed = unit.agreed("reduced", "reduce_scatter", f"gradients of {names}")
    unit.model.late.arrive(keep=_MAX_LATE)
    with nullcontext(nullcontext) if unit.is_fake else agreed as waiting, profiler_ranges.of_unit(unit.fqn):
        launched = collectives.launch_grads(written, mean)

    @functools.cache
    def arrived() -> dict[int, Tensor]:
        return host_copies.on_host(collectives.arrived_grads(launched, mean), unit.plan)

    given: list[Tensor | None] = [None] * len(unit.shards)
    for i in dict.fromkeys(i for i, _ in written):
        reduction = Reduction(unit.fqn, lambda i=i: arrived()[i], waiting)  # type: ignore[misc]
        slots = [j for shard, j in written if shard == i]
        given[i] = reduction.grad if unit.is_fake else unit.model.late.defer(reduction, unit.shards[i].sink, slots)
    return given


def _with_zeros(written: Parameters, unit: Unit) -> Parameters:
    """Add zeros for the trained parameters of a unit without a gradient, so that all ranks reduce the same ones."""
    device, dtypes = next(iter(written.values())).device, {i: grad.dtype for (i, _), grad in written.items()}
    found: Parameters = {}
    for i, shard in enumerate(unit.plan.shards):
        dtype = dtypes.get(i, unit.plan.unsharded_dtype(shard))
        for j, slot in enumerate(shard.slots) if shard.trainable else ():
            grad = written.get((i, j))
            found[i, j] = torch.zeros(slot.shape, dtype=dtype, device=device) if grad is None else grad
    return found
