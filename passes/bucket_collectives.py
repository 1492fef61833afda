"""Decide how much each launch moves: merge launches that are too small for the link, split those that are too large."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx import GraphModule

from fxshard.cost import bucket_sizes
from fxshard.cost.bucket_sizes import Limits
from fxshard.errors import ConfigError
from fxshard.ir.bucket_reader import launched_in, rewrite
from fxshard.ir.buckets import CollectiveBuilder, Gradient, ReduceBucket, UnitGather
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.memory_budget import MemoryBudget
from fxshard.ir.plan import UnitPlan
from fxshard.passes._base import GraphPass, PassContext, Property

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BucketCollectives(GraphPass):
    """Merge launches that are too small for the link, and split those that are too large.

    Before   %a = all_gather(%shard_0)   read of layer 0   %b = all_gather(%shard_1)   read of layer 1
    After    %ab = all_gather_coalesced([%shard_0, %shard_1])   read of layer 0   read of layer 1

    Attributes:
        size: "unit", one launch per unit and direction; "auto", buckets that use the link well, as
            `cost/bucket_sizes.py` finds for `hardware`; or MiB (of the whole buffer) that a bucket is filled up to.

    Buckets are filled in the order in which forward and backward meet the units, within a bucket in registration
    order; what a split launch brings is gathered where it is first read, or reduced after its last gradient.

    Numerics: unchanged; where several ranks' gradients are added in a ring, its order depends on their place in the
    buffer, so sums over three ranks or more may be rounded differently.
    Memory: a merged unit is gathered earlier than it is read, never beyond the budget; a split one later.
    No-op: size="unit", one rank, or where no launch is too small or too large.
    Limits: merges neighbours of one process group and dtype only; a parameter is never split; a launch
    with anything else in it is left alone.
    Source: Li et al., "PyTorch Distributed" (VLDB 2020), which buckets gradients so.
    """

    requires = frozenset({Property.COLLECTIVES})

    size: str | float = "unit"

    def __post_init__(self) -> None:
        """Reject sizes that no bucket can have."""
        if self.size in ("unit", "auto"):
            return
        if isinstance(self.size, bool | str) or not isinstance(self.size, int | float) or not 0 < self.size < math.inf:
            raise ConfigError(f'bucket must be "unit", "auto" or a positive number of MiB, got {self.size!r}.')

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
        if self.size == "unit":
            return False
        found = launched_in(gm.graph, ctx.plan)
        for launch in found.unread:
            ctx.decline(launch, "it moves something that is not a unit's parameters or gradients")
        room = MemoryBudget(gm.graph, ctx.unsharded_budget_bytes)
        writer = CollectiveBuilder(gm.graph, ctx.plan, ctx.decompositions, ctx.traced)
        gathers = self._gathers([part for parts in found.gathers.values() for part in parts], ctx, room)
        reductions = self._reductions(list(found.reductions.values()), ctx)
        notes = rewrite(writer, found, gathers, reductions)
        for launch, why in notes:
            ctx.note(launch, why)
        return bool(notes)

    def _gathers(
        self, parts: Sequence[UnitGather], ctx: PassContext, room: MemoryBudget
    ) -> list[tuple[list[UnitGather], str]]:
        """The all_gathers, in the order in which they will stand, and why."""
        units = ctx.plan.units
        limits = self._limits([part.unit for part in parts], ctx)
        pieces = [piece for part in parts for piece in _split_gather(part, units[part.unit], limits)]
        pieces.sort(key=_first_read)
        sizes = [sum(_gather_bytes(units[piece.unit], slot) for slot in _slots(piece)) for piece in pieces]
        dtypes = [{_gathered_dtype(units[piece.unit], slot) for slot in _slots(piece)} for piece in pieces]

        def may_join(bucket: list[int], newcomer: int) -> bool:
            names = [pieces[i].unit for i in (*bucket, newcomer)]
            early = sum(sizes[i] for i in (*bucket[1:], newcomer))
            first, last = (_first_read(pieces[i]) for i in (bucket[0], newcomer))
            same_dtype = dtypes[bucket[0]] == dtypes[newcomer]  # a launch has one
            return same_dtype and _can_share(names, ctx) and room.fits(first, last, early)

        merged = bucket_sizes.merge(sizes, limits, may_join)
        return [([pieces[i] for i in bucket], _why(sum(sizes[i] for i in bucket), limits)) for bucket in merged]

    def _reductions(self, reductions: Sequence[ReduceBucket], ctx: PassContext) -> list[tuple[ReduceBucket, str]]:
        """The reduce_scatters, in the order in which they will stand, and why."""
        units = ctx.plan.units
        limits = self._limits([unit for reduction in reductions for unit in reduction.calls], ctx)
        pieces = [piece for reduction in reductions for piece in _split_reduce(reduction, units, limits)]
        pieces.sort(key=lambda piece: max(itertools.chain.from_iterable(piece.terms.values())))
        sizes = [sum(_reduce_bytes(units, piece.dtype, gradient) for gradient in piece.terms) for piece in pieces]

        def may_join(bucket: list[int], newcomer: int) -> bool:
            names = [unit for i in (*bucket, newcomer) for unit in pieces[i].calls]
            return pieces[bucket[0]].dtype is pieces[newcomer].dtype and _can_share(names, ctx)

        merged = bucket_sizes.merge(sizes, limits, may_join)
        return [(_join([pieces[i] for i in bucket]), _why(sum(sizes[i] for i in bucket), limits)) for bucket in merged]

    def _limits(self, units: Iterable[str], ctx: PassContext) -> Limits:
        world_size = max((ctx.plan.units[unit].world_size for unit in units), default=2)
        if isinstance(self.size, str):
            return bucket_sizes.auto_limits(ctx.hardware, world_size)
        return Limits(enough=self.size * MIB, most=self.size * MIB)


def _slots(part: UnitGather) -> list[SlotIndex]:
    return sorted(itertools.chain.from_iterable(part.segments))


def _first_read(part: UnitGather) -> fx.Node:
    return min(part.reads.values())


def _gather_bytes(unit: UnitPlan, slot: SlotIndex) -> int:
    """Of a gathered parameter, padding included."""
    numel = unit.shards[slot[0]].slots[slot[1]].numel
    return numel * unit.world_size * _gathered_dtype(unit, slot).itemsize


def _gathered_dtype(unit: UnitPlan, slot: SlotIndex) -> torch.dtype:
    return unit.unsharded_dtype(unit.shards[slot[0]])


def _reduce_bytes(units: Mapping[str, UnitPlan], dtype: torch.dtype, gradient: Gradient) -> int:
    """Of an unsharded gradient in the reduction's dtype, padding included."""
    unit, (shard, slot) = units[gradient[0]], gradient[1]
    return unit.shards[shard].slots[slot].numel * unit.world_size * dtype.itemsize


def _split_gather(part: UnitGather, unit: UnitPlan, limits: Limits) -> Iterator[UnitGather]:
    """`part` in pieces that are not too large; without those that nothing reads."""
    slots = _slots(part)
    for stretch in bucket_sizes.split([_gather_bytes(unit, slot) for slot in slots], limits.most):
        reads = {slots[i]: part.reads[slots[i]] for i in stretch if slots[i] in part.reads}
        groups = itertools.groupby((slots[i] for i in stretch), key=lambda slot: slot[0])
        segments = tuple(tuple(group) for _, group in groups)
        segments = tuple(segment for segment in segments if any(slot in part.reads for slot in segment))
        flats = {segment[0][0]: part.flats[segment[0][0]] for segment in segments}
        if reads:
            yield replace(part, segments=segments, flats=flats, reads=reads)


def _split_reduce(reduction: ReduceBucket, units: Mapping[str, UnitPlan], limits: Limits) -> Iterator[ReduceBucket]:
    """`reduction` in pieces of one unit each that are not too large."""
    for unit, group in itertools.groupby(sorted(reduction.gradients), key=lambda gradient: gradient[0]):
        gradients = list(group)
        sizes = [_reduce_bytes(units, reduction.dtype, gradient) for gradient in gradients]
        for stretch in bucket_sizes.split(sizes, limits.most):
            terms = {gradients[i]: reduction.terms[gradients[i]] for i in stretch}
            yield replace(reduction, tensors=(tuple(terms),), terms=terms, calls={unit: reduction.calls[unit]})


def _join(pieces: Sequence[ReduceBucket]) -> ReduceBucket:
    """One launch with all gradients in one tensor, in registration order."""
    terms = {gradient: nodes for piece in pieces for gradient, nodes in piece.terms.items()}
    calls = {unit: call for piece in pieces for unit, call in piece.calls.items()}
    return replace(pieces[0], tensors=(tuple(terms),), terms=terms, calls=calls)


def _can_share(units: Sequence[str], ctx: PassContext) -> bool:
    """Whether one launch can serve these units: all different, and of one process group."""
    groups = {(ctx.plan.units[unit].group, ctx.plan.units[unit].reduce_group) for unit in units}
    return len(set(units)) == len(units) and len(groups) == 1


def _why(nbytes: int, limits: Limits) -> str:
    return f"{nbytes / MIB:.2f} MiB, where {limits.enough / MIB:.2f} are enough and {limits.most / MIB:.2f} the most"
