"""Give every rank its rows of full tensors that one rank has, or that each has; the way back of `gather`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxshard.runtime.raw import as_bytes
from fxshard.state.local_shards import MIB, LocalShard, device_of
from fxshard.state.ranks import Ranks
from fxshard.state.rounds import Item, Kind, Round, rounds_of
from fxshard.state.transport import Buckets, UnderWay, Wire, launched, lengths, part, run


class _FromOne:
    """Sends and receives: from the full tensors of the source into the rows of the others."""

    def __init__(
        self, wire: Wire, items: Sequence[Item], rows: Sequence[Tensor], rounds: Sequence[Round], source: int
    ) -> None:
        self.wire = wire
        self.items = items
        self.rows = [as_bytes(each) for each in rows]
        self.source = source
        self.buckets = Buckets(rounds, wire.world_size if wire.rank == source else 1, wire.device)
        self.fulls: Sequence[Tensor] = []

    def pieces(self, each: Round, rank: int) -> list[Tensor]:
        """What a rank is to get of the chunks of a round, on the source."""
        spans = [(i, *self.items[i].held_by(rank, first, last)) for i, first, last in each.chunks]
        return [part(self.fulls[i], start, end) for i, start, end in spans]

    def targets(self, each: Round) -> list[Tensor]:
        """Where this rank wants what it is to get."""
        taken = lengths(self.items, each.chunks, self.wire.rank)
        return [self.rows[i][first : first + n] for (i, first, _), n in zip(each.chunks, taken, strict=True)]

    def send(self, each: Round) -> UnderWay:
        """Of the source: send everybody's rows, and take its own."""
        wire, kept, ops = self.wire, [], []
        bucket = self.buckets.next(wire.world_size * each.width) if each.kind is Kind.PACKED else None
        for rank in range(wire.world_size):
            pieces = self.pieces(each, rank)
            total = sum(piece.numel() for piece in pieces)
            if rank == self.source or not total:
                continue
            if bucket is None:
                payload = wire.here(pieces[0])
            else:
                payload = bucket[rank * each.width : rank * each.width + total]
                wire.cat(pieces, payload)
            kept.append(payload)
            ops.append(wire.send(payload, rank))
        works = launched(ops)
        for target, piece in zip(self.targets(each), self.pieces(each, self.source), strict=True):
            target.copy_(piece)
        return UnderWay(each, works, kept=kept)

    def receive(self, each: Round) -> UnderWay:
        """Of the others: receive their rows, straight into place if one large item comes alone."""
        targets = self.targets(each)
        total = sum(target.numel() for target in targets)
        if not total:
            return UnderWay(each, [])
        is_direct = each.kind is not Kind.PACKED and targets[0].device == self.wire.device
        landing = targets[0] if is_direct else self.buckets.next(total)
        return UnderWay(each, launched([self.wire.receive(landing, self.source)]), None if is_direct else landing)

    def finish(self, under_way: UnderWay) -> None:
        """Wait for a round, and take what came."""
        under_way.wait()
        if under_way.bucket is not None:
            targets = self.targets(under_way.round)
            pieces = torch.split(under_way.bucket, [target.numel() for target in targets])
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(piece)


def from_one(
    wire: Wire,
    items: Sequence[Item],
    rows: Sequence[Tensor],
    rounds: Sequence[Round],
    source: int,
    fulls: Sequence[Tensor] | None,
) -> None:
    """Fill `rows` with this rank's part of the full tensors that rank `source` of the group has."""
    scatter = _FromOne(wire, items, rows, rounds, source)
    if fulls is None:
        run(rounds, scatter.receive, scatter.finish)
        return
    scatter.fulls = fulls
    run(rounds, scatter.send, scatter.finish)


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


def deliver(
    targets: Sequence[LocalShard],
    fulls: Sequence[Tensor] | None,
    source: int | None,
    ranks: Ranks,
    bucket_mib: float,
) -> None:
    """Fill this rank's rows of every target, and the whole of those that are not cut into rows.

    Args:
        targets: what to fill; alike on all ranks, contiguous.
        fulls: the full tensors, where they are.
        source: global rank that has them; `None` if every rank has.
        ranks: the ranks.
        bucket_mib: of a bucket.
    """
    if source is None or ranks.group is None or ranks.size == 1:
        for target, full in zip(targets, fulls or (), strict=True):
            _cut(target, full)
        return
    bucket_bytes = int(bucket_mib * MIB)
    by_mesh: dict[DeviceMesh | None, list[int]] = {}
    for i, each in enumerate(targets):
        by_mesh.setdefault(each.mesh, []).append(i)
    for mesh, indices in by_mesh.items():
        chosen = [targets[i] for i in indices]
        given = None if fulls is None else [fulls[i] for i in indices]
        if mesh is None:
            wire = Wire(ranks.group, ranks.device)
            broadcast(wire, [each.local for each in chosen], ranks.members.index(source), given, bucket_bytes)
            continue
        wire = Wire(mesh.get_group(), device_of(chosen))
        items = [each.item(wire.world_size, straight=wire.device.type == "cpu") for each in chosen]
        rounds = rounds_of(items, wire.world_size, bucket_bytes)
        rank = dist.get_process_group_ranks(wire.group).index(source)
        from_one(wire, items, [each.local for each in chosen], rounds, rank, given)


def _cut(target: LocalShard, full: Tensor) -> None:
    """Take this rank's part of a full tensor that it has itself."""
    start, end = 0, target.nbytes
    if target.mesh is not None and target.nbytes:
        start, end = target.item(target.mesh.size(), straight=False).held_by(target.mesh.get_local_rank())
    as_bytes(target.local).copy_(part(full, start, end))
