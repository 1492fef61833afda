"""Parameters outside compiled graphs: gather a unit once per call, hand out its parameters, reduce once.

[Note: inside a forward]
`module.weight` is the DTensor shard for everybody but the forward: a stray read must not launch a collective on one
rank only. "Inside a forward" means inside the call of any sharded unit on this thread (modules read each other's
weights), or inside a backward (activation checkpointing runs forwards again there).

[Note: after a forward]
A loss may read a weight (`fused_cross_entropy(hidden, model.head.weight, labels)`). FSDP2's root, and every unit that
does not reshard after forward, is unsharded then, until its backward. So here too: such a read gives the unsharded
parameter, whose gradient is reduced in its own backward. It is gathered at the first read; the ranks compare that they
all read, as before a graph (`agreement.py`). A backward, the next forward, and any change of the parameters end it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxshard.errors import InvariantError, UnsupportedGraph
from fxshard.ir import collectives, fake
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.order import Launch
from fxshard.runtime import agreement, ranges
from fxshard.runtime.reference import ParameterRef
from fxshard.runtime.unit import Unit, home_of

Parameters = dict[SlotIndex, Tensor]

LOST_WRITE = (
    "The change would be lost with the gathered copy. Change parameters outside of forward, under torch.no_grad(): "
    "after the optimizer's step, say."
)

_RETURNED = "_fxshard_parameter"
"""Attribute of a gathered parameter that a graph has returned: its FQN."""


class _Scope:
    """One call of a unit's module: what was gathered in it, by unit and autograd mode.

    Attributes:
        units: that the module was made into.
        gathered: parameters, by unit, grad mode and inference mode.
        watched: FQN, parameter, and its version when it was gathered.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.gathered: dict[tuple[int, bool, bool], Parameters] = {}
        self.watched: list[tuple[str, Tensor, int]] = []

    def parameters_of(self, unit: Unit) -> Parameters:
        key = (id(unit), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if key not in self.gathered:
            self.gathered[key] = unshard(unit)
            for (i, j), value in self.gathered[key].items():
                self.watch(unit.plan.shards[i].slots[j].fqn, value)
        return self.gathered[key]

    def watch(self, fqn: str, value: Tensor) -> None:
        if not value.is_inference():
            self.watched.append((fqn, value, value._version))

    def require_unchanged(self) -> None:
        changed = [fqn for fqn, value, version in self.watched if value._version != version]
        if changed:
            names = ", ".join(dict.fromkeys(changed))
            raise UnsupportedGraph(f"parameters were changed in place during forward: {names}. {LOST_WRITE}")


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
        """Closed at first."""
        self.epoch: int | None = None
        self._gathered: Parameters = {}
        self._launch = agreement.guard(_gather_after_forward, "read", (_launch_of(unit),))

    def open(self, unit: Unit, gathered: Parameters) -> None:
        """The outermost call has ended; `gathered` is what autograd can use of it, or nothing."""
        self.epoch, self._gathered = unit.epoch(), gathered

    def close(self) -> None:
        """The parameters are sharded again."""
        self.epoch, self._gathered = None, {}

    def parameter(self, unit: Unit, slot: SlotIndex) -> Tensor | None:
        """The unsharded parameter, `None` if the unit is closed."""
        if self.epoch != unit.epoch():
            self.close()
            return None
        if not self._gathered:
            self._gathered = self._launch([unit])
        return self._gathered[slot]


def _launch_of(unit: Unit) -> Launch:
    text = f"all_gather of all parameters on group {unit.plan.group!r} for {unit.fqn or 'root'}, read after forward"
    return Launch(unit.plan.group, text, "outside of graphs", "all_gather", unit.fqn)


def _gather_after_forward(units: list[Unit]) -> Parameters:
    (unit,) = units
    with torch.inference_mode(False), torch.enable_grad():
        return unshard(unit)


def forward_ended(units: Iterable[Unit], gathered: Mapping[tuple[int, bool, bool], Parameters]) -> None:
    """The outermost call of a model ends: what it does not reshard may be read until its backward."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and fake.backward_id() is None:
        for unit in units:
            if not unit.plan.reshard_after_forward:
                unit.after_forward = unit.after_forward or AfterForward(unit)
                unit.after_forward.open(unit, gathered.get((id(unit), True, False), {}))


def enter_call(units: Sequence[Unit]) -> None:
    """A module that these units were made for starts its call; `leave_call` must follow, also after an error."""
    _scopes.calls += not _scopes.stack
    _scopes.stack.append(_Scope(units))


def leave_call(nested: Iterable[Unit]) -> None:
    """The innermost call ends; what it gathered lives on only where autograd saved it, or may be read after forward.

    Args:
        nested: the units of the module and of all modules inside.
    """
    scope = _scopes.stack.pop()
    scope.require_unchanged()
    if not _scopes.stack:
        forward_ended(nested, scope.gathered)


def note_returned(value: Tensor, fqn: str) -> None:
    """A graph gives out a gathered parameter (a graph break comes between its read and its use)."""
    setattr(value, _RETURNED, fqn)
    if _scopes.stack:
        _scopes.stack[-1].watch(fqn, value)


def returned_name(value: object) -> str | None:
    """The FQN of a gathered parameter that a graph has given out, `None` for anything else."""
    return getattr(value, _RETURNED, None) if isinstance(value, Tensor) else None


def inside_call() -> bool:
    """Whether the caller runs inside the call of a sharded module."""
    return bool(_scopes.stack)


def inside_forward() -> bool:
    """See [Note: inside a forward]."""
    return bool(_scopes.stack) or fake.backward_id() is not None


def running() -> Running | None:
    """What this thread runs now, `None` for nothing of ours."""
    backward = fake.backward_id()
    if backward is not None:
        return Running(True, backward)
    return Running(False, _scopes.calls) if _scopes.stack else None


def read(ref: ParameterRef) -> Tensor:
    """The unsharded parameter, gathered at the first read in the running call of its unit."""
    home = home_of(ref.flat)
    if home is None:
        raise InvariantError("a parameter reference points to a tensor that is not a flat of any unit.")
    return _scope_for(home.unit).parameters_of(home.unit)[home.shard, ref.slot]


def read_after_forward(ref: ParameterRef) -> Tensor | None:
    """The unsharded parameter of a unit that is between forward and backward, `None` if it is sharded."""
    home = home_of(ref.flat)
    if home is None or home.unit.after_forward is None:
        return None
    return home.unit.after_forward.parameter(home.unit, (home.shard, ref.slot))


def _scope_for(unit: Unit) -> _Scope:
    """The innermost call of the unit itself, else the innermost call, else the running backward's recomputation."""
    for scope in reversed(_scopes.stack):
        if unit in scope.units:
            return scope
    if _scopes.stack:
        return _scopes.stack[-1]
    backward = fake.backward_id()
    if backward is None:
        raise InvariantError("an unsharded parameter was asked for outside of any forward or backward.")
    if _scopes.recompute is None or _scopes.recompute[0] != backward:
        _scopes.recompute = (backward, _Scope(()))
    return _scopes.recompute[1]


def unshard(unit: Unit) -> Parameters:
    """All parameters of a unit, in one launch, differentiable with respect to its flats."""
    index = [(i, j) for i, shard in enumerate(unit.shards) for j in range(len(shard.members))]
    values = _UnshardUnit.apply(unit, index, *(s.flat for s in unit.shards))  # type: ignore[no-untyped-call]
    return dict(zip(index, values, strict=True))


class _UnshardUnit(torch.autograd.Function):
    """all_gather forward, reduce_scatter backward: the collectives of `ir/collectives.py`, run as they are."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, index: list[SlotIndex], *flats: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.index, ctx.epoch = unit, index, unit.epoch()
        ctx.set_materialize_grads(False)
        with fake.unseen_by_policies(), ranges.of_unit(unit.fqn):
            values = collectives.unshard(dict(enumerate(flats)), unit.plan, index)
        frozen = [v for v, (i, _) in zip(values, index, strict=True) if not unit.shards[i].plan.trainable]
        ctx.mark_non_differentiable(*frozen)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        unit: Unit = ctx.unit
        unit.require_epoch(ctx.epoch)
        written = {slot: grad for slot, grad in zip(ctx.index, grads, strict=True) if grad is not None}
        _scopes.recompute = None
        unit.microbatches.backward_runs()
        if written and not unit.accumulation.sync:
            unit.accumulation.add(unit, written)
            written = {}
        if not written:
            return (None, None, *(None for _ in unit.shards))
        written = unit.accumulation.finish(unit, written)
        for i, j in written:
            unit.shards[i].sink.expect((j,))
        with ranges.of_unit(unit.fqn):
            reduced = collectives.reduce_grads(written, unit.plan)
        return (None, None, *(reduced.get(i) for i in range(len(unit.shards))))
