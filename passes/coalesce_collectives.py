"""Choose how many tensors each launch sends: those that are expensive to copy go by themselves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch.fx import GraphModule

from fxshard.cost.bucket_sizes import copy_seconds
from fxshard.ir import collectives, launches
from fxshard.ir.buckets import CollectiveBuilder, GatherBucket, ReduceBucket, UnitGather, buckets_of
from fxshard.ir.collectives import SlotIndex, UnitSlot
from fxshard.passes._base import GraphPass, PassContext, Property

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class CoalesceCollectives(GraphPass):
    """Choose for each launch between one tensor, with copies, and several, without.

    Before   %u = all_gather(%shard)   %w = wait(%u)   weight = copy of columns of %w   bias = copy of columns of %w
    After    %u = all_gather_coalesced([slice of %shard, slice of %shard])   weight = wait(%u[0])   bias = wait(%u[1])

    A parameter that is a tensor of its own needs no copy out of the gathered buffer, and its gradient no copy into the
    reduction's buffer; each further tensor costs the launch some time. A *cut* says which of them share a tensor; the
    cheapest for `hardware` is taken. What is sent of a shard is a view of it, so nothing is copied before an
    all_gather; what nobody reads is not sent. A gradient with uneven rows is padded by itself, so the others need no
    copy for it.

    A matrix that a library's kernel reads is copied by a kernel of its own. What generated kernels alone read, such as
    the weight of a norm, they read where it lies, which costs no kernel.

    Attributes:
        fuses_copies: whether what reads a copy may be one kernel with it, as in code of Inductor's.
        same_sums: reduce all gradients of a launch in one buffer, as FSDP2 does. A ring adds the ranks' values in an
            order that depends on where in the buffer they lie, so this keeps sums bit for bit those of FSDP2.
        hands_off: whether the next graph runs beside the last reduction of a graph that is a part of the model
            (`hand_off_reductions`). Then that is one tensor: of several the graph would wait, to put them together.

    Numerics: unchanged for gathers; sums over three ranks or more may be rounded differently, see `same_sums`.
    Memory: less; a parameter that is not copied out needs no buffer to be copied out of.
    No-op: one rank, or where one tensor per launch is the cheapest.
    Limits: gathered parameters that share a tensor are neighbours in registration order; a launch with anything else in
        it is left alone.
    Source: the copies are those of FSDP2's `foreach_all_gather` and `foreach_reduce` (`_fsdp_collectives.py`).
    """

    requires = frozenset({Property.COLLECTIVES})

    fuses_copies: bool = False
    same_sums: bool = False
    hands_off: bool = False

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        launched = buckets_of(gm.graph, ctx.plan)
        for launch in launched.unread:
            ctx.decline(launch, "it moves something that is not a unit's parameters or gradients")
        gathers = [self._coalesce_gathers(bucket, ctx) for bucket in launched.gathers.values()]
        whole = max(launched.reductions.values(), key=lambda bucket: bucket.last_term, default=None)
        if not self.hands_off or not ctx.plan.is_part:
            whole = None
        reductions = [self._coalesce_reduction(each, each is whole, ctx) for each in launched.reductions.values()]
        builder = CollectiveBuilder(gm.graph, ctx.plan, ctx.decompositions, ctx.traced)
        made = builder.rewrite(launched, gathers, reductions)
        for launch, why in made:
            ctx.note(launch, why)
        return bool(made)

    def _coalesce_gathers(self, bucket: GatherBucket, ctx: PassContext) -> tuple[GatherBucket, str]:
        coalesced = [self._coalesce_gather(gather, ctx) for gather in bucket]
        return tuple(gather for gather, _ in coalesced), "; ".join(why for _, why in coalesced)

    def _coalesce_gather(self, gather: UnitGather, ctx: PassContext) -> tuple[UnitGather, str]:
        if ctx.plan.units[gather.unit].gathers_whole:
            return gather, ""
        cuts, uncuts = [], []
        for _, slots in itertools.groupby(gather.slots, key=lambda slot: slot[0]):  # a tensor is of one shard
            copies = {slot: self._copy_out_seconds(gather, slot, ctx) for slot in slots}
            cuts.append(_cut_between_neighbours(copies, ctx.hardware.gather_tensor_overhead))
            uncuts.append(_one_tensor(copies))
        cut: _Cut[SlotIndex] = _together(cuts)
        return gather.sending(cut.tensors), _why(gather.unit, cut, _together(uncuts))

    def _copy_out_seconds(self, gather: UnitGather, slot: SlotIndex, ctx: PassContext) -> float:
        """Return what gathering a parameter alone saves; the bytes count where it is read in place, too."""
        nbytes, read = ctx.plan.units[gather.unit].unsharded_bytes_of(slot), gather.reads.get(slot)
        is_kernel = not self.fuses_copies or read is None or launches.is_read_by_a_library(read)
        return copy_seconds(nbytes, ctx.hardware, is_kernel=is_kernel)

    def _coalesce_reduction(
        self, reduction: ReduceBucket, is_handed_off: bool, ctx: PassContext
    ) -> tuple[ReduceBucket, str]:
        if any(ctx.plan.units[unit].reduces_whole for unit in reduction.calls):
            return reduction, "an object of the user's reduces it whole"
        copies = {gradient: _copy_in_seconds(reduction, gradient, ctx) for gradient in reduction.gradients}
        cut = one_tensor = _one_tensor(copies)
        if not self.same_sums and not is_handed_off:
            several = _cut_anywhere(copies, ctx.hardware.reduce_tensor_overhead)
            shard_bytes = sum(reduction.shard_bytes_of(gradient, ctx.plan) for gradient in copies)
            put_together = copy_seconds(shard_bytes, ctx.hardware)  # the shard's gradient, of what was reduced
            cut = several if several.seconds + put_together < one_tensor.seconds else one_tensor
        return replace(reduction, tensors=cut.tensors), _why(", ".join(reduction.calls), cut, one_tensor)


def _copy_in_seconds(reduction: ReduceBucket, gradient: UnitSlot, ctx: PassContext) -> float:
    """Return what sending a gradient alone saves; nothing if it is cast, divided, padded or expanded anyway."""
    unit = ctx.plan.units[gradient[0]]
    shape = unit.slot(gradient[1]).shape
    is_sent_as_it_is = (
        bool(shape)
        and shape[0] % unit.world_size == 0
        and collectives.sum_dtype(reduction.terms[gradient]) is reduction.dtype
        and collectives.division_of(unit, reduction.dtype).before == 1
    )
    nbytes = reduction.unsharded_bytes_of(gradient, ctx.plan)
    return copy_seconds(nbytes, ctx.hardware) if is_sent_as_it_is else 0.0


@dataclass(frozen=True, kw_only=True)
class _Cut(Generic[_T]):
    """Which parameters or gradients share a tensor of a launch, and what that costs."""

    tensors: tuple[tuple[_T, ...], ...]  # each thing once, in the given order within a tensor
    copy_seconds: float  # for copying things in or out of tensors that they share
    tensor_seconds: float  # that the tensors after the first cost

    @property
    def seconds(self) -> float:
        return self.copy_seconds + self.tensor_seconds


def _one_tensor(copies: Mapping[_T, float]) -> _Cut[_T]:
    """Put everything into one tensor; one thing alone needs no copy."""
    return _cut([tuple(copies)], copies, 0.0)


def _cut_anywhere(copies: Mapping[_T, float], tensor_seconds: float) -> _Cut[_T]:
    """Find the cheapest cut: what is expensive to copy alone, the rest together."""
    rest = tuple(thing for thing, seconds in copies.items() if seconds <= tensor_seconds)
    alone = [(thing,) for thing, seconds in copies.items() if seconds > tensor_seconds]
    return _cut([rest, *alone] if rest else alone, copies, tensor_seconds)


def _cut_between_neighbours(copies: Mapping[_T, float], tensor_seconds: float) -> _Cut[_T]:
    """Find the cheapest cut into tensors of neighbours, in time linear in their number."""
    # Up to each thing: the least cost with the last tensor closed there, and with one that may go on.
    closed, running, running_start = [-tensor_seconds], float("inf"), 0
    starts: list[int] = []  # of the last tensor, in the cheapest way that is closed at each thing
    for i, seconds in enumerate(copies.values()):
        begin = closed[i] + tensor_seconds
        running, running_start = min((running + seconds, running_start), (begin + seconds, i))
        closed.append(min(begin, running))
        starts.append(i if begin <= running else running_start)
    things, tensors = list(copies), list[tuple[_T, ...]]()
    end = len(things)
    while end:
        tensors.append(tuple(things[starts[end - 1] : end]))
        end = starts[end - 1]
    return _cut(tensors[::-1], copies, tensor_seconds)


def _cut(tensors: Sequence[tuple[_T, ...]], copies: Mapping[_T, float], tensor_seconds: float) -> _Cut[_T]:
    shared = itertools.chain.from_iterable(tensor for tensor in tensors if len(tensor) > 1)
    return _Cut(
        tensors=tuple(tensors),
        copy_seconds=sum(copies[thing] for thing in shared),
        tensor_seconds=tensor_seconds * (len(tensors) - 1),
    )


def _together(cuts: Sequence[_Cut[_T]]) -> _Cut[_T]:
    return _Cut(
        tensors=tuple(itertools.chain.from_iterable(cut.tensors for cut in cuts)),
        copy_seconds=sum(cut.copy_seconds for cut in cuts),
        tensor_seconds=sum(cut.tensor_seconds for cut in cuts),
    )


def _why(unit: str, cut: _Cut[_T], one_tensor: _Cut[_T]) -> str:
    if len(cut.tensors) == 1:
        return f"{unit or 'root'}: one tensor, {one_tensor.copy_seconds * 1e6:.0f} us of copies"
    saved, more = (one_tensor.copy_seconds - cut.copy_seconds) * 1e6, cut.tensor_seconds * 1e6
    changes = f"{saved:.0f} us of copies less for {more:.0f} us more on the link"
    return f"{unit or 'root'}: {len(cut.tensors)} tensors, {changes}"
