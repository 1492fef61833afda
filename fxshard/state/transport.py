"""Move the rounds of [Note: how full state travels]: gather on one rank or on all, scatter from one rank.

Everything travels as bytes, so a bucket holds any mix of dtypes, and no collective sees more than one.

[Note: rounds under way]
A round is started before those ahead of it are finished: two with a bucket each, two with rows that had to be copied
because they are not contiguous, and any number with neither. On an accelerator that overlaps them: the copy out of one
bucket is queued behind its own transfer alone, while the next transfer runs on the stream of the process group. Before
a bucket is used again the process group waits for what was queued, so no stream or event of ours is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fxshard.runtime.raw import as_bytes
from fxshard.state.rounds import Item, Kind, Round, rounds_of

# torch 2.13 renamed it, and warns about the old name.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_MOST_UNDER_WAY = 32

Progress = Callable[[int], None]
"""Told how many bytes have arrived."""


def part(tensor: Tensor, first: int, last: int) -> Tensor:
    """Return bytes `first` to `last` of a tensor: its own memory if contiguous, else a copy of rows around them."""
    if tensor.is_contiguous():
        return as_bytes(tensor)[first:last]
    row = tensor[0].nbytes
    start = first // row
    return as_bytes(tensor[start : -(-last // row)])[first - start * row : last - start * row]


@dataclass(eq=False)
class Wire:
    """The ranks that share tensors, and what this rank may take for it."""

    group: dist.ProcessGroup
    device: torch.device  # where the group's collectives work
    rank: int = field(init=False)  # in the group
    world_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)

    def send(self, tensor: Tensor, peer: int) -> dist.P2POp:
        """Make a send to `peer` of the group, to be launched."""
        return dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer)

    def receive(self, tensor: Tensor, peer: int) -> dist.P2POp:
        """Make a receive from `peer` of the group, to be launched."""
        return dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer)

    def all_gather(self, gathered: Tensor, own: Tensor) -> dist.Work:
        """Launch an all_gather; `own` may be this rank's part of `gathered`."""
        return cast(dist.Work, _ALL_GATHER(gathered, own, group=self.group, async_op=True))

    def here(self, tensor: Tensor) -> Tensor:
        """Return the tensor where collectives work."""
        return tensor if tensor.device == self.device else tensor.to(self.device)

    def cat(self, pieces: Sequence[Tensor], out: Tensor) -> None:
        """Write pieces one after the other into `out`."""
        if len({piece.device for piece in pieces} | {out.device}) == 1:
            torch.cat(list(pieces), out=out)
            return
        for target, piece in zip(torch.split(out, [piece.numel() for piece in pieces]), pieces, strict=True):
            target.copy_(piece)


class Buckets:
    """Two buckets that take turns; made when first needed."""

    def __init__(self, rounds: Iterable[Round], num_regions: int, device: torch.device) -> None:
        self._nbytes = num_regions * max((each.width for each in rounds), default=0)
        self._device, self._buckets = device, deque[Tensor](maxlen=2)

    def next(self, nbytes: int) -> Tensor:
        """Return the first `nbytes` of the bucket whose turn it is."""
        is_new = len(self._buckets) < 2
        bucket = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device) if is_new else self._buckets[0]
        self._buckets.append(bucket)
        return bucket[:nbytes]


@dataclass(eq=False)
class UnderWay:
    """A round that was started."""

    round: Round
    works: list[Any]
    bucket: Tensor | None = None
    kept: Any = None  # what must live until the works are done
    is_copy: bool = False  # whether that is memory of its own, beside buckets


def launched(ops: list[dist.P2POp]) -> list[Any]:
    """Launch sends and receives together, if there are any."""
    return list(dist.batch_isend_irecv(ops)) if ops else []


@dataclass(eq=False)
class _Collective:
    """What gathering and scattering share; `root` is the rank with the full tensors, `None` if all get them."""

    wire: Wire
    items: Sequence[Item]
    rows: Sequence[Tensor]
    rounds: Sequence[Round]
    root: int | None

    def __post_init__(self) -> None:
        num_regions = self.wire.world_size if self.root in (None, self.wire.rank) else 1
        self.buckets = Buckets(self.rounds, num_regions, self.wire.device)

    def start(self, each: Round) -> UnderWay:
        raise NotImplementedError

    def finish(self, under_way: UnderWay) -> None:
        raise NotImplementedError

    def run(self) -> None:
        """Run all rounds; see [Note: rounds under way]."""
        waiting: deque[UnderWay] = deque()
        for each in self.rounds:
            while len(waiting) == _MOST_UNDER_WAY or _is_full(waiting, each):
                self._end(waiting.popleft())
            waiting.append(self.start(each))
        while waiting:
            self._end(waiting.popleft())

    def _end(self, under_way: UnderWay) -> None:
        for work in under_way.works:
            work.wait()
        self.finish(under_way)

    def lengths(self, each: Round, rank: int) -> list[int]:
        held = [(self.items[i].nbytes - rank * self.items[i].share, first, last) for i, first, last in each.chunks]
        return [last - first if last <= nbytes else max(0, nbytes - first) for nbytes, first, last in held]

    def others(self, each: Round) -> Iterator[tuple[int, int]]:
        for rank in range(self.wire.world_size):
            if rank != self.wire.rank and (nbytes := sum(self.lengths(each, rank))):
                yield rank, nbytes

    def own(self, each: Round) -> list[Tensor]:
        """Return what this rank has of the chunks of a round: its own memory, or a copy if that is not contiguous."""
        sizes = self.lengths(each, self.wire.rank)
        return [part(self.rows[i], first, first + n) for (i, first, _), n in zip(each.chunks, sizes, strict=True)]


def _is_full(waiting: Iterable[UnderWay], each: Round) -> bool:
    """Return whether a round must be finished before the next is started, for the memory that those under way take."""
    num_buckets, num_copies = sum(1 for x in waiting if x.round.width), sum(x.is_copy for x in waiting)
    return (each.width > 0 and num_buckets == 2) or num_copies == 2


@dataclass(eq=False)
class _Gather(_Collective):
    """Sends and receives, so that only a rank that wants the result receives it; all_gathers, if all want it."""

    result_device: torch.device
    progress: Progress
    _fulls: dict[int, Tensor] = field(default_factory=dict, init=False)

    def full(self, i: int) -> Tensor:
        if i not in self._fulls:
            self._fulls[i] = torch.empty(self.items[i].nbytes, dtype=torch.uint8, device=self.result_device)
        return self._fulls[i]

    def start(self, each: Round) -> UnderWay:
        if self.root is None:
            return self._all_gather(each)
        return self._receive(each) if self.wire.rank == self.root else self._send(each)

    def _send(self, each: Round) -> UnderWay:
        own, bucket = self.own(each), None
        total = sum(piece.numel() for piece in own)
        if each.kind is Kind.PACKED and total:
            bucket = self.buckets.next(total)
            self.wire.cat(own, bucket)
        payload = self.wire.here(own[0]) if bucket is None else bucket
        ops = [self.wire.send(payload, cast(int, self.root))] if total else []
        return UnderWay(each, launched(ops), kept=payload, is_copy=self._is_copy(each))

    def _receive(self, each: Round) -> UnderWay:
        """Launch what the others send, and meanwhile take what this rank has itself."""
        wire = self.wire
        bucket = self.buckets.next(wire.world_size * each.width) if each.width else None
        ops = []
        for rank, nbytes in self.others(each):
            landing = self._place(each, rank) if bucket is None else bucket[rank * each.width :][:nbytes]
            ops.append(wire.receive(landing, rank))
        works, own = launched(ops), self.own(each)
        kept = None
        if each.kind is not Kind.PACKED or bucket is None:
            self._place(each, wire.rank).copy_(own[0])
        elif self.result_device == wire.device:
            kept = own
        else:  # one copy of the bucket to another device is cheaper than one of each tensor
            wire.cat(own, bucket[wire.rank * each.width :][: sum(piece.numel() for piece in own)])
        return UnderWay(each, works, bucket, kept=kept)

    def _all_gather(self, each: Round) -> UnderWay:
        """Launch it; regions are equal, so what a rank lacks in its own is filled up."""
        own = self.own(each)
        if each.kind is Kind.STRAIGHT:
            rows = self.wire.here(own[0])
            work = self.wire.all_gather(self.full(each.chunks[0].item), rows)
            return UnderWay(each, [work], kept=rows, is_copy=self._is_copy(each))
        bucket = self.buckets.next(self.wire.world_size * each.width)
        region = bucket[self.wire.rank * each.width :][: each.width]
        self.wire.cat(own, region[: sum(piece.numel() for piece in own)])
        works = [self.wire.all_gather(bucket, region)]
        if each.kind is Kind.SPLIT:
            self._place(each, self.wire.rank).copy_(own[0])
        return UnderWay(each, works, bucket)

    def finish(self, under_way: UnderWay) -> None:
        if self.root not in (None, self.wire.rank):
            return
        each, bucket = under_way.round, under_way.bucket
        if bucket is not None and each.kind is Kind.PACKED:
            self._unpack(bucket, each, under_way.kept)
        elif bucket is not None:
            for rank, nbytes in self.others(each):
                self._place(each, rank).copy_(bucket[rank * each.width :][:nbytes])
        self.progress(self._nbytes(each))

    def _is_copy(self, each: Round) -> bool:
        return each.kind is not Kind.PACKED and not self.rows[each.chunks[0].item].is_contiguous()

    def _place(self, each: Round, rank: int) -> Tensor:
        ((i, first, last),) = each.chunks
        start, end = self.items[i].held_by(rank, first, last)
        return self.full(i)[start:end]

    def _unpack(self, bucket: Tensor, each: Round, own: Sequence[Tensor] | None) -> None:
        """Join the rows of all ranks of many small items; this rank's are `own`, or in the bucket as the others'."""
        bucket = bucket.to(self.result_device)
        parts: list[Sequence[Tensor]] = []
        for rank in range(self.wire.world_size):
            if own is not None and rank == self.wire.rank:
                parts.append(own)
                continue
            sizes = self.lengths(each, rank)
            parts.append(bucket[rank * each.width :][: sum(sizes)].split(sizes))
        for chunk, pieces in zip(each.chunks, zip(*parts, strict=True), strict=True):
            self._fulls[chunk.item] = torch.cat(pieces)

    def _nbytes(self, each: Round) -> int:
        if each.kind is Kind.PACKED:
            return sum(self.items[chunk.item].nbytes for chunk in each.chunks)
        return sum(sum(self.lengths(each, rank)) for rank in range(self.wire.world_size))


@dataclass(eq=False)
class _Scatter(_Collective):
    """Sends and receives: from the full tensors of the source into the rows of the others."""

    fulls: Sequence[Tensor] | None

    def start(self, each: Round) -> UnderWay:
        return self._receive(each) if self.fulls is None else self._send(each, self.fulls)

    def _send(self, each: Round, fulls: Sequence[Tensor]) -> UnderWay:
        wire, kept, ops = self.wire, [], []
        bucket = self.buckets.next(wire.world_size * each.width) if each.kind is Kind.PACKED else None
        for rank, nbytes in self.others(each):
            pieces = self._pieces(each, rank, fulls)
            if bucket is None:
                payload = wire.here(pieces[0])
            else:
                payload = bucket[rank * each.width :][:nbytes]
                wire.cat(pieces, payload)
            kept.append(payload)
            ops.append(wire.send(payload, rank))
        works = launched(ops)
        for target, piece in zip(self.own(each), self._pieces(each, wire.rank, fulls), strict=True):
            target.copy_(piece)
        return UnderWay(each, works, kept=kept)

    def _pieces(self, each: Round, rank: int, fulls: Sequence[Tensor]) -> list[Tensor]:
        spans = [(i, *self.items[i].held_by(rank, first, last)) for i, first, last in each.chunks]
        return [part(fulls[i], start, end) for i, start, end in spans]

    def _receive(self, each: Round) -> UnderWay:
        """Receive this rank's rows, straight into place if one large item comes alone."""
        targets = self.own(each)
        total = sum(target.numel() for target in targets)
        if not total:
            return UnderWay(each, [])
        is_direct = each.kind is not Kind.PACKED and targets[0].device == self.wire.device
        landing = targets[0] if is_direct else self.buckets.next(total)
        works = launched([self.wire.receive(landing, cast(int, self.root))])
        return UnderWay(each, works, None if is_direct else landing)

    def finish(self, under_way: UnderWay) -> None:
        if under_way.bucket is not None:
            targets = self.own(under_way.round)
            pieces = torch.split(under_way.bucket, [target.numel() for target in targets])
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(piece)


def gather(
    wire: Wire,
    items: Sequence[Item],
    rows: Sequence[Tensor],
    rounds: Sequence[Round],
    recipient: int | None,
    result_device: torch.device,
    progress: Progress,
) -> list[Tensor]:
    """Gather on rank `recipient` of the group, or on all; return the bytes of each item there, elsewhere nothing.

    `rows` are this rank's rows of each item. If all want the result, straight items must be even; straight items need
    the wire's device as `result_device`.
    """
    collective = _Gather(wire, items, rows, rounds, recipient, result_device, progress)
    collective.run()
    return [collective.full(i) for i in range(len(items))] if recipient in (None, wire.rank) else []


def scatter(
    wire: Wire,
    items: Sequence[Item],
    rows: Sequence[Tensor],
    rounds: Sequence[Round],
    source: int,
    fulls: Sequence[Tensor] | None,
) -> None:
    """Fill `rows`, which are contiguous, with this rank's part of the full tensors of rank `source` of the group."""
    _Scatter(wire, items, rows, rounds, source, fulls).run()


def broadcast(
    wire: Wire, targets: Sequence[Tensor], source: int, fulls: Sequence[Tensor] | None, bucket_bytes: int
) -> None:
    """Fill `targets`, which every rank has whole, with what rank `source` of the group has."""
    into = [as_bytes(target) for target in targets]
    items = [Item(each.numel(), each.numel(), False) for each in into]
    for each in rounds_of(items, 1, bucket_bytes):
        bucket = torch.empty(each.width, dtype=torch.uint8, device=wire.device)
        if fulls is not None:
            wire.cat([part(fulls[i], first, last) for i, first, last in each.chunks], bucket)
        dist.broadcast(bucket, group_src=source, group=wire.group)
        pieces = torch.split(bucket, [last - first for _, first, last in each.chunks])
        for (i, first, last), piece in zip(each.chunks, pieces, strict=True):
            into[i][first:last].copy_(piece)
