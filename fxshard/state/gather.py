"""Bring the rows of all ranks together, on one rank or on all; see [Note: how full state travels]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxshard.runtime.raw import as_bytes
from fxshard.state.rounds import Item, Kind, Round
from fxshard.state.transport import Buckets, Progress, UnderWay, Wire, launched, lengths, part, run


class _Results:
    """The full tensors, in bytes: made when the first bytes of each arrive."""

    def __init__(self, items: Sequence[Item], device: torch.device) -> None:
        self._items = items
        self._device = device
        self._bytes: list[Tensor | None] = [None] * len(items)

    def of(self, i: int) -> Tensor:
        found = self._bytes[i]
        if found is None:
            found = self._bytes[i] = torch.empty(self._items[i].nbytes, dtype=torch.uint8, device=self._device)
        return found

    def put(self, i: int, full: Tensor) -> None:
        self._bytes[i] = full

    def all(self) -> list[Tensor]:
        return [self.of(i) for i in range(len(self._items))]


class _GatherBase:
    """What both ways of gathering share: this rank's rows, and what comes out of a bucket."""

    def __init__(self, wire: Wire, items: Sequence[Item], rows: Sequence[Tensor], result_device: torch.device) -> None:
        self.wire = wire
        self.items = items
        self.rows = rows
        self.results = _Results(items, result_device)
        self.result_device = result_device

    def own(self, each: Round) -> list[Tensor]:
        """What this rank has of the chunks of a round."""
        if each.kind is Kind.PACKED:  # whole shares
            return [as_bytes(self.rows[chunk.item]) for chunk in each.chunks]
        ((i, first, last),) = each.chunks
        return [part(self.rows[i], first, min(last, self.rows[i].nbytes))]

    def is_copy(self, each: Round) -> bool:
        """Whether what this rank has of a large item had to be copied."""
        return each.kind is not Kind.PACKED and not self.rows[each.chunks[0].item].is_contiguous()

    def copy_own(self, each: Round) -> None:
        """Put this rank's rows of a large item into their place."""
        ((i, first, last),) = each.chunks
        start, end = self.items[i].held_by(self.wire.rank, first, last)
        if end > start:
            self.results.of(i)[start:end].copy_(part(self.rows[i], first, first + end - start))

    def copy_from(self, bucket: Tensor, each: Round) -> None:
        """Put what the other ranks sent of a large item into its place."""
        ((i, first, last),) = each.chunks
        for rank in range(self.wire.world_size):
            start, end = self.items[i].held_by(rank, first, last)
            if rank != self.wire.rank and end > start:
                region = rank * each.width
                self.results.of(i)[start:end].copy_(bucket[region : region + end - start])

    def unpack(self, bucket: Tensor, each: Round, own: Sequence[Tensor] | None) -> None:
        """Join the rows of all ranks of many small items; this rank's are `own`, or in the bucket as the others'."""
        bucket = bucket.to(self.result_device)
        parts: list[Sequence[Tensor]] = []
        for rank in range(self.wire.world_size):
            if own is not None and rank == self.wire.rank:
                parts.append(own)
                continue
            sizes = lengths(self.items, each.chunks, rank)
            parts.append(bucket[rank * each.width :][: sum(sizes)].split(sizes))
        for chunk, pieces in zip(each.chunks, zip(*parts, strict=True), strict=True):
            self.results.put(chunk.item, torch.cat(pieces))

    def nbytes(self, each: Round) -> int:
        """What a round moves, in the full tensors."""
        if each.kind is Kind.PACKED:
            return sum(self.items[chunk.item].nbytes for chunk in each.chunks)
        return sum(sum(lengths(self.items, each.chunks, rank)) for rank in range(self.wire.world_size))


class _ToOne(_GatherBase):
    """Sends and receives, so that only the rank that wants the result receives it."""

    def __init__(
        self,
        wire: Wire,
        items: Sequence[Item],
        rows: Sequence[Tensor],
        result_device: torch.device,
        rounds: Sequence[Round],
        recipient: int,
        progress: Progress,
    ) -> None:
        super().__init__(wire, items, rows, result_device)
        self.recipient = recipient
        self.progress = progress
        self.buckets = Buckets(rounds, wire.world_size if wire.rank == recipient else 1, wire.device)

    def send(self, each: Round) -> UnderWay:
        """Of the other ranks: send what this one has."""
        own, bucket = self.own(each), None
        total = sum(piece.numel() for piece in own)
        if each.kind is Kind.PACKED and total:
            bucket = self.buckets.next(total)
            self.wire.cat(own, bucket)
        payload = self.wire.here(own[0]) if bucket is None else bucket
        ops = [self.wire.send(payload, self.recipient)] if total else []
        return UnderWay(each, launched(ops), kept=payload, is_copy=self.is_copy(each))

    def receive(self, each: Round) -> UnderWay:
        """Of the recipient: launch what the others send, and meanwhile take what it has itself."""
        wire, bucket = self.wire, None
        if each.width:
            bucket = self.buckets.next(wire.world_size * each.width)
        ops = []
        for rank in range(wire.world_size):
            nbytes = sum(lengths(self.items, each.chunks, rank))
            if rank != self.recipient and nbytes:
                ops.append(wire.receive(self._landing(each, rank, nbytes, bucket), rank))
        works = launched(ops)
        if each.kind is not Kind.PACKED or bucket is None:
            self.copy_own(each)
            return UnderWay(each, works, bucket)
        own = self.own(each)
        if self.result_device == wire.device:
            return UnderWay(each, works, bucket, kept=own)
        # One copy of the bucket to another device is cheaper than one of each tensor.
        wire.cat(own, bucket[wire.rank * each.width :][: sum(piece.numel() for piece in own)])
        return UnderWay(each, works, bucket)

    def _landing(self, each: Round, rank: int, nbytes: int, bucket: Tensor | None) -> Tensor:
        if bucket is not None:
            return bucket[rank * each.width : rank * each.width + nbytes]
        ((i, first, last),) = each.chunks
        start, end = self.items[i].held_by(rank, first, last)
        return self.results.of(i)[start:end]

    def finish(self, under_way: UnderWay) -> None:
        """Wait for a round, and take what came."""
        under_way.wait()
        if self.wire.rank != self.recipient:
            return
        each = under_way.round
        if each.kind is Kind.PACKED and under_way.bucket is not None:
            self.unpack(under_way.bucket, each, under_way.kept)
        elif under_way.bucket is not None:
            self.copy_from(under_way.bucket, each)
        self.progress(self.nbytes(each))


class _ToAll(_GatherBase):
    """All_gathers; regions are equal, so what a rank lacks in its own is filled up."""

    def __init__(
        self,
        wire: Wire,
        items: Sequence[Item],
        rows: Sequence[Tensor],
        result_device: torch.device,
        rounds: Sequence[Round],
        progress: Progress,
    ) -> None:
        super().__init__(wire, items, rows, result_device)
        self.progress = progress
        self.buckets = Buckets(rounds, wire.world_size, wire.device)

    def start(self, each: Round) -> UnderWay:
        """Launch the all_gather of a round, from the place in the result where this rank's part belongs."""
        own = self.own(each)
        if each.kind is Kind.STRAIGHT:
            rows = self.wire.here(own[0])
            full = self.results.of(each.chunks[0].item)
            return UnderWay(each, [self.wire.all_gather(full, rows)], kept=rows, is_copy=self.is_copy(each))
        bucket = self.buckets.next(self.wire.world_size * each.width)
        region = bucket[self.wire.rank * each.width : (self.wire.rank + 1) * each.width]
        self.wire.cat(own, region[: sum(piece.numel() for piece in own)])
        return UnderWay(each, [self.wire.all_gather(bucket, region)], bucket)

    def finish(self, under_way: UnderWay) -> None:
        """Wait for a round, and take what came."""
        under_way.wait()
        each = under_way.round
        if each.kind is Kind.PACKED and under_way.bucket is not None:
            self.unpack(under_way.bucket, each, None)
        elif under_way.bucket is not None:
            self.copy_from(under_way.bucket, each)
            self.copy_own(each)
        self.progress(self.nbytes(each))


def to_one(
    wire: Wire,
    items: Sequence[Item],
    rows: Sequence[Tensor],
    rounds: Sequence[Round],
    recipient: int,
    result_device: torch.device,
    progress: Progress,
) -> list[Tensor]:
    """Gather on rank `recipient` of the group.

    Args:
        wire: the ranks.
        items: what to gather.
        rows: this rank's rows of each.
        rounds: of the items, by `rounds_of`.
        recipient: which rank of the group.
        result_device: where the full tensors go; straight items need the wire's.
        progress: told on the recipient.

    Returns:
        The bytes of each item on the recipient, elsewhere nothing.
    """
    gather = _ToOne(wire, items, rows, result_device, rounds, recipient, progress)
    if wire.rank != recipient:
        run(rounds, gather.send, gather.finish)
        return []
    run(rounds, gather.receive, gather.finish)
    return gather.results.all()


def to_all(
    wire: Wire,
    items: Sequence[Item],
    rows: Sequence[Tensor],
    rounds: Sequence[Round],
    result_device: torch.device,
    progress: Progress,
) -> list[Tensor]:
    """Gather on every rank; the bytes of each item. Straight items must be even."""
    gather = _ToAll(wire, items, rows, result_device, rounds, progress)
    run(rounds, gather.start, gather.finish)
    return gather.results.all()
