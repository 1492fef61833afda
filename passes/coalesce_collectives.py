"""Send as tensors of their own the parameters and gradients that are dear to copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fxshard.cost import bucket_sizes
from fxshard.cost.bucket_sizes import Cut
from fxshard.ir import collectives
from fxshard.ir.bucket_reader import launched_in, rewrite
from fxshard.ir.buckets import CollectiveBuilder, Gradient, ReduceBucket, UnitGather, sum_dtype
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class CoalesceCollectives(GraphPass):
    """Choose for each launch between one tensor, with copies, and several, without.

    Before   %u = all_gather(%shard)   %w = wait(%u)   weight = copy of columns of %w   bias = copy of columns of %w
    After    %u = all_gather_coalesced([slice of %shard, slice of %shard])   weight = wait(%u[0])   bias = wait(%u[1])

    A parameter that is a tensor of its own needs no copy out of the gathered buffer, and its gradient no copy into the
    reduction's buffer; each further tensor costs the launch some time. `cost/bucket_sizes.py` weighs the two for
    `hardware`. What is sent of a shard is a view of it, so nothing is ever copied before an all_gather; what nobody
    reads is not sent. A gradient with uneven rows is padded by itself and does not make the others be copied.

    Attributes:
        same_sums: reduce all gradients of a launch in one buffer, as FSDP2 does. A ring adds the ranks' values in an
            order that depends on where in the buffer they lie, so this keeps sums bit for bit those of FSDP2.

    Numerics: unchanged for gathers; sums over three ranks or more may be rounded differently, see `same_sums`.
    Memory: less; a parameter that is not copied out needs no buffer to be copied out of.
    No-op: one rank, or where one tensor per launch is the cheapest.
    Limits: gathered parameters that share a tensor are neighbours in registration order; a launch with anything else in
    it is left alone.
    Source: the copies are those of FSDP2's `foreach_all_gather` and `foreach_reduce` (`_fsdp_collectives.py`).
    """

    requires = frozenset({Property.COLLECTIVES})

    same_sums: bool = False

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
        found = launched_in(gm.graph, ctx.plan)
        for launch in found.unread:
            ctx.decline(launch, "it moves something that is not a unit's parameters or gradients")
        gathers = [_cut_bucket(parts, ctx) for parts in found.gathers.values()]
        reductions = [self._cut_reduction(reduction, ctx) for reduction in found.reductions.values()]
        notes = rewrite(
            CollectiveBuilder(gm.graph, ctx.plan, ctx.decompositions, ctx.traced), found, gathers, reductions
        )
        for launch, why in notes:
            ctx.note(launch, why)
        return bool(notes)

    def _cut_reduction(self, reduction: ReduceBucket, ctx: PassContext) -> tuple[ReduceBucket, str]:
        """The gradients that are dear to copy in alone, the others together."""
        gradients = reduction.gradients
        copies = [_saved_by_sending_alone(reduction, gradient, ctx) for gradient in gradients]
        uncut = cut = bucket_sizes.uncut(copies)
        if not self.same_sums:
            free = bucket_sizes.cut_freely(copies, ctx.hardware.reduce_tensor_overhead)
            put_together = sum(_shard_bytes(reduction, gradient, ctx) for gradient in gradients)
            is_better = free.seconds + bucket_sizes.copy_seconds(put_together, ctx.hardware) < uncut.seconds
            cut = free if is_better else uncut
        tensors = tuple(tuple(gradients[i] for i in group) for group in cut.groups)
        return replace(reduction, tensors=tensors), _why(", ".join(reduction.calls), cut, uncut)


def _cut_bucket(parts: Sequence[UnitGather], ctx: PassContext) -> tuple[list[UnitGather], str]:
    cut = [_cut_gather(part, ctx) for part in parts]
    return [part for part, _ in cut], "; ".join(why for _, why in cut)


def _cut_gather(part: UnitGather, ctx: PassContext) -> tuple[UnitGather, str]:
    """The parameters that are dear to copy out alone, neighbours among the others together; what is read of them."""
    unit, segments = ctx.plan.units[part.unit], []
    cuts, uncuts = [], []
    slots = sorted(itertools.chain.from_iterable(part.segments))
    for index, group in itertools.groupby(slots, key=lambda slot: slot[0]):
        stretch, shard = list(group), unit.shards[index]
        itemsize = unit.unsharded_dtype(shard).itemsize * unit.world_size
        copies = [bucket_sizes.copy_seconds(shard.slots[i].numel * itemsize, ctx.hardware) for _, i in stretch]
        cuts.append(bucket_sizes.cut_in_row(copies, ctx.hardware.gather_tensor_overhead))
        uncuts.append(bucket_sizes.uncut(copies))
        segments += [tuple(stretch[i] for i in members) for members in cuts[-1].groups]
    read = tuple(segment for segment in segments if any(slot in part.reads for slot in segment))
    flats = {segment[0][0]: part.flats[segment[0][0]] for segment in read}
    why = _why(part.unit, bucket_sizes.together(cuts), bucket_sizes.together(uncuts))
    return replace(part, segments=read, flats=flats), why


def _saved_by_sending_alone(reduction: ReduceBucket, gradient: Gradient, ctx: PassContext) -> float:
    """Seconds of copying a gradient in; none where it is cast, divided, padded or expanded anyway."""
    unit, (shard, slot) = ctx.plan.units[gradient[0]], gradient[1]
    shape = unit.shards[shard].slots[slot].shape
    as_it_is = (
        bool(shape)
        and shape[0] % unit.world_size == 0
        and sum_dtype(reduction.terms[gradient]) is reduction.dtype
        and collectives.division(unit.world_size, reduction.dtype).before == 1
    )
    nbytes = _shard_bytes(reduction, gradient, ctx) * unit.world_size
    return bucket_sizes.copy_seconds(nbytes, ctx.hardware) if as_it_is else 0.0


def _shard_bytes(reduction: ReduceBucket, gradient: Gradient, ctx: PassContext) -> int:
    """Of a reduced gradient on one rank."""
    unit, (shard, slot) = gradient
    return ctx.plan.units[unit].shards[shard].slots[slot].numel * reduction.dtype.itemsize


def _why(unit: str, cut: Cut, uncut: Cut) -> str:
    """The cut in words."""
    if len(cut.groups) == 1:
        return f"{unit or 'root'}: one tensor, {uncut.copies * 1e6:.0f} us of copies"
    saved, more = (uncut.copies - cut.copies) * 1e6, cut.tensors * 1e6
    return (
        f"{unit or 'root'}: {len(cut.groups)} tensors, {saved:.0f} us of copies less for {more:.0f} us more on the link"
    )
