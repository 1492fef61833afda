"""Decide how much each launch moves: merge launches that are too small for the link, split those that are too large."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import fx
from torch.fx import GraphModule

from fxshard.cost import bucket_sizes
from fxshard.cost.bucket_sizes import MIB, Limits
from fxshard.cost.sizes import sizes_of
from fxshard.cost.timeline import Timeline
from fxshard.errors import ConfigError
from fxshard.ir.buckets import (
    CollectiveBuilder,
    GatherBucket,
    ReduceBucket,
    UnitGather,
    buckets_of,
    early_bytes,
    held_bytes,
    unit_of,
)
from fxshard.ir.collectives import SlotIndex, UnitSlot
from fxshard.ir.memory_budget import MemoryBudget
from fxshard.passes._base import GraphPass, PassContext, Property

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class BucketCollectives(GraphPass):
    """Merge launches that are too small for the link, and split those that are too large.

    Before   %a = all_gather(%shard_0)   read of layer 0   %b = all_gather(%shard_1)   read of layer 1
    After    %ab = all_gather_coalesced([%shard_0, %shard_1])   read of layer 0   read of layer 1

    Attributes:
        size: "unit", one launch per unit and direction; "auto", buckets that use the link well, as
            `cost/bucket_sizes.py` finds for `hardware`; or MiB (of the whole buffer) that a bucket is filled up to.
        peak_share: how many more unsharded bytes, and bytes of gradients, the merged launches of "auto" may hold at any
            time than a launch for each unit, in units of the largest unit in the graph.
        hands_off: whether the next graph runs beside the last reduction of a graph that is a part of the model, so that
            "auto" does not split it: to join what parts of it bring the graph would wait for them.

    Buckets are filled in the order in which the graph meets the units, within a bucket in registration order. What a
    split launch brings is gathered where it is first read, or reduced after its last gradient. "auto" also splits where
    other units come in between, and at [Note: the two ends of a graph] (`cost/bucket_sizes.py`).

    Numerics: unchanged; but a ring adds in an order that depends on the place in the buffer: sums over three ranks or
        more may be rounded differently.
    Memory: a merged unit is gathered earlier than it is read, within the budget and `peak_share`; a split one later.
    No-op: size="unit", one rank, or where no launch is too small or too large.
    Limits: merges neighbours of one dtype and process group; no parameter is split; other launches are left alone.
    Source: Li et al., "PyTorch Distributed" (VLDB 2020), which buckets gradients so.
    """

    requires = frozenset({Property.COLLECTIVES})

    size: str | float = "unit"
    peak_share: float = 1.0
    hands_off: bool = False

    def __post_init__(self) -> None:
        bucket_sizes.check(self.size)
        share = self.peak_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not share >= 0:
            raise ConfigError(f"bucket_peak_share must be a number, 0 or more, got {share!r}.")

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        if self.size == "unit":
            return False
        launched = buckets_of(gm.graph, ctx.plan)
        for launch in launched.unread:
            ctx.decline(launch, "it moves something that is not a unit's parameters or gradients")
        timeline = Timeline(sizes_of(gm.graph, ctx.plan), ctx.hardware) if self.size == "auto" else None
        parts = [part for bucket in launched.gathers.values() for part in bucket]
        gathers = self._bucket_gathers(parts, timeline, ctx, gm.graph)
        reductions = self._bucket_reductions(list(launched.reductions.values()), timeline, ctx)
        builder = CollectiveBuilder(gm.graph, ctx.plan, ctx.decompositions, ctx.traced)
        made = builder.rewrite(launched, gathers, reductions)
        for launch, why in made:
            ctx.note(launch, why)
        return bool(made)

    def _bucket_gathers(
        self, gathers: Sequence[UnitGather], timeline: Timeline | None, ctx: PassContext, graph: fx.Graph
    ) -> list[tuple[GatherBucket, str]]:
        """Split the large ones, then merge neighbours among them in the order in which they are read."""
        limits = self._limits([gather.unit for gather in gathers], ctx)
        budgets = [MemoryBudget(graph, ctx.unsharded_budget_bytes), MemoryBudget(graph, limits.more, counts_all=False)]
        places = sorted(gather.first_read for gather in gathers)
        ends = [] if ctx.plan.is_part else places[:1]
        splitters = [_Splitter(timeline, places, at_end=gather.first_read in ends) for gather in gathers]
        cut = (_split_gather(gather, s, limits, ctx) for gather, s in zip(gathers, splitters, strict=True))
        pieces = sorted(itertools.chain.from_iterable(cut), key=lambda piece: piece.first_read)

        def may_join(bucket: Sequence[UnitGather], piece: UnitGather) -> bool:
            joined = (*bucket, piece)
            early = early_bytes(joined, ctx.plan)
            can_share = _can_share_launch([part.unit for part in joined], ctx, "gathers_whole")
            return can_share and all(b.fits(joined[0].first_read, piece.first_read, early) for b in budgets)

        alike: dict[frozenset[torch.dtype], list[UnitGather]] = {}  # a launch has one dtype, a unit may have several
        for piece in pieces:
            alike.setdefault(frozenset(piece.dtypes(ctx.plan)), []).append(piece)
        merged: list[list[UnitGather]] = []
        for same in sorted(alike.values(), key=lambda same: same[0].slots):  # as the shards of a unit stand
            buckets = bucket_sizes.merge(same, lambda piece: piece.nbytes(ctx.plan), limits, may_join)
            for bucket in buckets:  # it is early while those of another dtype are merged, too
                for budget in budgets:
                    budget.reserve(bucket[0].first_read, bucket[-1].first_read, early_bytes(bucket, ctx.plan))
            merged += buckets
        return [(tuple(bucket), _why(bucket, early_bytes(bucket, ctx.plan), limits, ctx)) for bucket in merged]

    def _bucket_reductions(
        self, reductions: Sequence[ReduceBucket], timeline: Timeline | None, ctx: PassContext
    ) -> list[tuple[ReduceBucket, str]]:
        """Split the large ones, then merge neighbours among them in the order in which their gradients are there."""
        limits = self._limits([unit for reduction in reductions for unit in reduction.calls], ctx)
        places = sorted(reduction.last_term for reduction in reductions)
        ends = [] if ctx.plan.is_part else places[-1:]
        splitters = [_Splitter(timeline, places, at_end=reduction.last_term in ends) for reduction in reductions]
        whole = places[-1:] if self.size == "auto" and self.hands_off and ctx.plan.is_part else []
        most = [replace(limits, most=math.inf) if each.last_term in whole else limits for each in reductions]
        cut = map(functools.partial(_split_reduction, ctx=ctx), reductions, splitters, most)
        pieces = sorted(itertools.chain.from_iterable(cut), key=lambda piece: piece.last_term)

        def may_join(bucket: Sequence[ReduceBucket], piece: ReduceBucket) -> bool:
            joined = (*bucket, piece)
            units = [unit for part in joined for unit in part.calls]
            fits = held_bytes(joined, ctx.plan) <= limits.more and bucket[0].dtype is piece.dtype
            return fits and _can_share_launch(units, ctx, "reduces_whole")

        buckets = bucket_sizes.merge(pieces, lambda piece: piece.nbytes(ctx.plan), limits, may_join)
        return [(_join(bucket), _why(bucket, held_bytes(bucket, ctx.plan), limits, ctx)) for bucket in buckets]

    def _limits(self, units: Iterable[str], ctx: PassContext) -> Limits:
        plans = [ctx.plan.units[unit] for unit in units]
        world_size = max((unit.world_size for unit in plans), default=2)
        limits = bucket_sizes.limits_of(self.size, ctx.hardware, world_size)
        more = self.peak_share * max((unit.unsharded_bytes for unit in plans), default=0)
        return replace(limits, more=more) if self.size == "auto" else limits


@dataclass(frozen=True)
class _Splitter:
    """Where a launch is cut besides for its size; nowhere without a `timeline`."""

    timeline: Timeline | None  # of the graph
    others: Sequence[fx.Node]  # where launches of the graph are needed, or may start, in order; its own among them
    at_end: bool  # whether nothing hides it; see [Note: the two ends of a graph]

    def split(
        self, things: Sequence[_T], nbytes: Callable[[_T], int], place: Callable[[_T], fx.Node | None], limits: Limits
    ) -> Iterator[list[_T]]:
        """Cut a row of parameters or gradients, each of which is read or there at its `place`, into pieces."""

        def are_apart(one: _T, other: _T) -> bool:
            places = place(one), place(other)
            if self.timeline is None or None in places:
                return False
            first, last = sorted(cast("tuple[fx.Node, fx.Node]", places))
            between = bisect.bisect_left(self.others, last) - bisect.bisect_right(self.others, first)
            seconds = self.timeline.computed_before(last) - self.timeline.computed_before(first)
            return between > 0 or (self.at_end and seconds > limits.latency)

        for span in bucket_sizes.cut(things, nbytes, are_apart, limits.enough if self.at_end else limits.small):
            yield from bucket_sizes.split(span, nbytes, limits.most)


def _split_gather(gather: UnitGather, splitter: _Splitter, limits: Limits, ctx: PassContext) -> Iterator[UnitGather]:
    """Cut `gather` into pieces that are not too large, without those that nothing reads."""
    if ctx.plan.units[gather.unit].gathers_whole:
        yield gather
        return
    places: dict[SlotIndex, fx.Node | None] = {}
    place: fx.Node | None = None
    for slot in gather.slots:
        if slot in gather.reads:
            place = min(gather.reads[slot].users, default=place)
        places[slot] = place  # what nobody reads goes with what stands before it
    nbytes = ctx.plan.units[gather.unit].unsharded_bytes_of
    for slots in splitter.split(gather.slots, nbytes, places.__getitem__, limits):
        by_shard = itertools.groupby(slots, key=lambda slot: slot[0])
        piece = gather.sending(tuple(slots_of_shard) for _, slots_of_shard in by_shard)
        if piece.reads:
            yield piece


def _split_reduction(
    reduction: ReduceBucket, splitter: _Splitter, limits: Limits, ctx: PassContext
) -> Iterator[ReduceBucket]:
    """Cut `reduction` into pieces of one unit each that are not too large."""
    if any(ctx.plan.units[unit].reduces_whole for unit in reduction.calls):
        yield reduction
        return

    def place(gradient: UnitSlot) -> fx.Node:
        return max(reduction.terms[gradient])

    nbytes = functools.partial(reduction.unsharded_bytes_of, plan=ctx.plan)
    for unit, gradients in itertools.groupby(sorted(reduction.gradients), key=unit_of):
        for tensor in splitter.split(list(gradients), nbytes, place, limits):
            terms = {gradient: reduction.terms[gradient] for gradient in tensor}
            yield replace(reduction, tensors=(tuple(tensor),), terms=terms, calls={unit: reduction.calls[unit]})


def _join(pieces: Sequence[ReduceBucket]) -> ReduceBucket:
    terms = {gradient: nodes for piece in pieces for gradient, nodes in piece.terms.items()}
    calls = {unit: call for piece in pieces for unit, call in piece.calls.items()}
    return replace(pieces[0], tensors=(tuple(terms),), terms=terms, calls=calls)


def _can_share_launch(units: Sequence[str], ctx: PassContext, alone: str) -> bool:
    """Return whether one launch can serve these units: all different, of the same process groups and division.

    Not if an object of the user's does it: the property `alone` of their plans.
    """
    plans = [ctx.plan.units[unit] for unit in units]
    if any(getattr(plan, alone) for plan in plans):
        return False
    ways = {(tuple(plan.groups), plan.divide_factor, plan.sums_only) for plan in plans}
    return len(set(units)) == len(units) and len(ways) == 1


def _why(parts: Sequence[UnitGather | ReduceBucket], early: float, limits: Limits, ctx: PassContext) -> str:
    nbytes, enough, most = sum(part.nbytes(ctx.plan) for part in parts) / MIB, limits.enough / MIB, limits.most / MIB
    size = f"{nbytes:.2f} MiB, where {enough:.2f} are enough and {most:.2f} the most"
    more = f"; {early / MIB:.2f} MiB more memory than {len(parts)} launches, where {limits.more / MIB:.2f} are the most"
    return size + more if len(parts) > 1 and limits.more < math.inf else size
