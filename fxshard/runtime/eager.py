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

[Note: parts of a unit]
The root of a model whose blocks are units may have a large embedding and head. As a whole it would be gathered before
the first block and reduced after the last one. So each large parameter is a part of its unit, with a launch, a wait
where it is read, a node of autograd and a reduction of its own: the head arrives while blocks run, and its reduction
runs beside their backward. The first read in a call launches all parts in the order of registration, whichever is read,
so the ranks launch alike. Reductions begin where autograd comes to them, as those of units do. Where ranks read what
their data decides, and zeros are reduced for the rest, the unit stays in one part; `_has_parts` has the other cases.
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
from fxshard.ir.collectives import Segment, SlotIndex
from fxshard.runtime import profiler_ranges, rank_check, streams, unsharded_cache
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


def _watched(values: Iterable[tuple[str, Tensor]]) -> list[_Watched]:
    return [_Watched(fqn, each, each._version, each.requires_grad) for fqn, each in values if not each.is_inference()]


class _Scope:
    """One call of a unit's module: what was gathered in it, by unit and autograd mode."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units  # that the module was made into
        self.gathered: dict[tuple[int, bool, bool], _UnitRead] = {}  # by unit, grad mode and inference mode
        self.returned: list[_Watched] = []  # gathered parameters that graphs have given out

    def parameter(self, unit: Unit, slot: SlotIndex, *, after_forward: bool = False) -> Tensor:
        key = (id(unit), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if key not in self.gathered:
            in_parts = bool(self.units) and _has_parts(unit)
            self.gathered[key] = _UnitRead(unit, slot, in_parts=in_parts, after_forward=after_forward)
        return self.gathered[key].parameter(slot)

    @property
    def watched(self) -> list[_Watched]:
        return [*self.returned, *(each for gather in self.gathered.values() for each in gather.watched)]

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
    def gathered(self) -> Iterable[_UnitRead]:
        """What was read and has the unit's values."""
        return self._scope.gathered.values() if self._epoch == self._unit.epoch() else ()

    def parameter(self, slot: SlotIndex) -> Tensor | None:
        """The unsharded parameter, `None` if it is sharded."""
        if self._epoch is not None and self._epoch != self._unit.epoch():
            self.end()
        if self._epoch is None:
            return None
        with torch.inference_mode(False), torch.enable_grad():
            return self._scope.parameter(self._unit, slot, after_forward=True)


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
    scope = _scopes.stack.pop()
    for gather in scope.gathered.values():
        gather.drop()
    scope.require_unchanged()


def note_returned(value: Tensor, fqn: str) -> None:
    """A graph gives out a gathered parameter (a graph break comes between its read and its use)."""
    setattr(value, _RETURNED, fqn)
    if _scopes.stack:
        _scopes.stack[-1].returned += _watched([(fqn, value)])


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
    return _scope_for(home.unit).parameter(home.unit, slot)


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
    running = [each for scope in _scopes.stack for each in scope.gathered.values() if each.unit is unit]
    gathers = (*running, *unit.step.after_forward.gathered)
    return {slot: value for gather in gathers for slot, value in gather.parameters.items()}


def _has_parts(unit: Unit) -> bool:
    """Whether large parameters are sent by themselves in a forward; see [Note: parts of a unit]."""
    settings = unit.settings
    has_comms = settings.all_gather_comm is not None or settings.reduce_scatter_comm is not None
    is_whole = settings.reduces_unused or has_comms or settings.offload is not None or bool(unit.plan.encoded)
    return unit.world_size > 1 and not (is_whole or unit.is_fake or torch_private.backward_id() is not None)


class _UnitRead:
    """All parameters of a unit, launched together, each part waited for when one of its parameters is taken.

    They are differentiable with respect to the unit's flats, also for a later read.
    """

    def __init__(self, unit: Unit, slot: SlotIndex, *, in_parts: bool, after_forward: bool) -> None:
        if not after_forward:
            unit.require_same_trainable()
        self.unit, self._after_forward = unit, after_forward
        self.parameters: Parameters = {}  # what has been taken
        self.watched: list[_Watched] = []  # the same, as it was then
        self._are_real = not unit.is_fake  # else there are no ranks, and the trace is ours
        when = "after forward" if after_forward else "outside of graphs"
        agreed = unit.agreed("read", "all_gather", f"all parameters, read {when},")
        with agreed if self._are_real else nullcontext(nullcontext) as self._waiting:
            with torch_private.outside_transforms(self._are_real), torch.no_grad():
                self._parts = self._launched(in_parts)
            self._take(slot)

    def _launched(self, in_parts: bool) -> list[_Part]:
        unit, shards = self.unit, dict(enumerate(shard.flat for shard in self.unit.shards))
        with profiler_ranges.of_unit(unit.fqn):
            launching = collectives.launch_unshard(streams.on_device(shards, unit.plan), unit.plan, in_parts=in_parts)
            first = next(launching)
        unit.model.prefetcher.prefetch_first()
        with profiler_ranges.of_unit(unit.fqn):
            return [_Part(unit, *each) for each in (first, *launching)]

    def parameter(self, slot: SlotIndex) -> Tensor:
        if slot not in self.parameters:
            with self._waiting():
                self._take(slot)
        return self.parameters[slot]

    def _take(self, slot: SlotIndex) -> None:
        part = next(each for each in self._parts if slot in each.slots)
        flats = [self.unit.shards[i].flat for i in part.shards]
        with torch_private.outside_transforms(self._are_real):
            values = _UnshardPart.apply(part, self._after_forward, *flats)  # type: ignore[no-untyped-call]
        self._parts.remove(part)
        members = [self.unit.shards[i].members[j] for i, j in part.slots]
        read = [member.read_from(value) for member, value in zip(members, values, strict=True)]
        self.parameters |= zip(part.slots, read, strict=True)
        self.watched += _watched(zip([member.fqn for member in members], read, strict=True))

    def drop(self) -> None:
        """Wait for the parts that nobody has taken."""
        if self._parts:
            with rank_check.waiting_for_unread({self.unit.plan.gathering_group}):
                unsharded_cache.drop(tensor for part in self._parts for tensor in part.launched)
            self._parts.clear()


class _Part:
    """Parameters of a unit that are sent, waited for and reduced together."""

    def __init__(self, unit: Unit, segments: list[Segment], launched: list[Tensor]) -> None:
        """`launched` is what is on the link, to be waited for."""
        self.unit, self._segments, self.launched, self.version = unit, segments, launched, unit.version()
        sent = {slot for segment in segments for slot in segment}
        index = [(i, j) for i, shard in enumerate(unit.shards) for j in range(len(shard.members))]
        self.slots = [slot for slot in index if slot in sent or slot[0] in unit.plan.encoded]
        self.shards = list(dict.fromkeys(i for i, _ in self.slots))

    def wait(self) -> list[Tensor]:
        unit, reads = self.unit, [slot for segment in self._segments for slot in segment]
        with profiler_ranges.of_wait(unit.fqn):
            found = collectives.parameters_in(self.launched, unit.plan, self._segments, reads)
        unsharded = unit.unsharded_of(dict(zip(reads, found, strict=True)))
        return [unsharded[slot] for slot in self.slots]


class _UnshardPart(torch.autograd.Function):
    """Wait for an all_gather forward, reduce_scatter backward: the collectives of `ir/collectives.py`, as they are."""

    @staticmethod
    def forward(ctx: Any, part: _Part, after_forward: bool, *flats: Tensor) -> tuple[Tensor, ...]:
        ctx.part, ctx.after_forward = part, after_forward
        ctx.set_materialize_grads(False)
        values = part.wait()
        part.launched.clear()
        frozen = [
            value for value, (i, _) in zip(values, part.slots, strict=True) if not part.unit.shards[i].plan.trainable
        ]
        ctx.mark_non_differentiable(*frozen)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        part: _Part = ctx.part
        unit = part.unit
        unit.require_version(part.version)
        written = {slot: grad for slot, grad in zip(part.slots, grads, strict=True) if grad is not None}
        _scopes.recompute = None
        unit.model.backward_runs(of_forward=not ctx.after_forward)
        if written and not unit.settings.sync:
            unit.step.accumulation.add(written)
            written = {}
        if not written:
            return (None, None, *(None for _ in part.shards))
        written = unit.step.accumulation.finish(written, part.slots)
        if unit.settings.reduces_unused:
            written = _with_zeros(written, unit)
        for i, j in written:
            unit.shards[i].sink.expect((j,))
        return (None, None, *_reduce(unit, written, part.shards))


def _reduce(unit: Unit, written: Parameters, shards: list[int]) -> list[Tensor | None]:
    """Launch the reduction of gradients; return those of these shards, `None` where the runtime gives them later.

    See [Note: late gradients] in `late_gradients.py`.
    """
    names, mean = ", ".join(unit.plan.shards[i].slots[j].fqn for i, j in written), unit.step.replica_sums.plan()
    agreed = unit.agreed("reduced", "reduce_scatter", f"gradients of {names}", written)
    unit.model.late.arrive(keep=_MAX_LATE)
    with nullcontext(nullcontext) if unit.is_fake else agreed as waiting, profiler_ranges.of_unit(unit.fqn):
        launched = collectives.launch_grads(written, mean)

    @functools.cache
    def arrived() -> dict[int, Tensor]:
        return streams.on_host(collectives.arrived_grads(launched, mean), unit.plan)

    given: dict[int, Tensor | None] = dict.fromkeys(shards)
    for i in dict.fromkeys(i for i, _ in written):
        reduction = Reduction(unit.fqn, lambda i=i: arrived()[i], waiting)  # type: ignore[misc]
        slots = [j for shard, j in written if shard == i]
        given[i] = reduction.grad if unit.is_fake else unit.model.late.defer(reduction, unit.shards[i].sink, slots)
    return list(given.values())


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
