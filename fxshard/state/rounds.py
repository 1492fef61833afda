"""Which bytes travel together: a plan that every rank makes for itself, and all the same.

[Note: how full state travels]
A sharded tensor of the full state is an `Item`. Of its bytes each rank holds one *share*, in rank order, by
`torch.chunk`'s rule: the last ranks hold less, or nothing. Items travel in rounds, of three kinds:

    PACKED     many small items, through a bucket: one region per rank, the ranks' rows one after the other
    STRAIGHT   one large item, from the rows where they lie into the full tensor, through no bucket at all
    SPLIT      a part of one large item that cannot: sent from where it lies, received in a bucket

A bucket has one region per rank, all equally wide, so a rank that sends needs only its region. Two buckets are under
way at a time: two of `bucket_bytes` on a rank that receives, two regions, which are one at most, elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

STRAIGHT_BYTES = 256 * 1024
"""A share from which a transfer of its own costs less than two copies through a bucket."""


class Kind(Enum):
    """How a round travels; see [Note: how full state travels]."""

    PACKED = "packed"
    STRAIGHT = "straight"
    SPLIT = "split"


class Item(NamedTuple):
    """A tensor of the full state."""

    nbytes: int  # of the full tensor
    share: int  # bytes that one rank holds at most
    straight: bool  # whether it may travel without a bucket

    def held_by(self, rank: int, first: int = 0, last: int | None = None) -> tuple[int, int]:
        """Return begin and end, in the full tensor, of what `rank` holds of bytes `first` to `last` of its share."""
        start = rank * self.share
        end = start + (self.share if last is None else last)
        return min(start + first, self.nbytes), min(end, start + self.share, self.nbytes)


class Chunk(NamedTuple):
    """Bytes `first` to `last` of every rank's share of an item."""

    item: int
    first: int
    last: int


class Round(NamedTuple):
    """What travels together."""

    kind: Kind
    chunks: tuple[Chunk, ...]  # one, unless packed; packed ones are whole shares
    width: int  # bytes of a region of the bucket, 0 where there is none


def rounds_of(items: Sequence[Item], world_size: int, bucket_bytes: int) -> list[Round]:
    """Cut and group items into rounds, the same on every rank; a bucket has at least 64 bytes for each."""
    return list(_rounds(items, max(64, bucket_bytes // max(world_size, 2))))


def _rounds(items: Sequence[Item], region: int) -> Iterator[Round]:
    packed: list[Chunk] = []
    width = 0
    for i, item in enumerate(items):
        if item.nbytes == 0:
            continue
        if item.share >= min(STRAIGHT_BYTES, region):
            yield from _large(i, item, region)
            continue
        if width + item.share > region:
            yield Round(Kind.PACKED, tuple(packed), width)
            packed, width = [], 0
        packed.append(Chunk(i, 0, item.share))
        width += item.share
    if packed:
        yield Round(Kind.PACKED, tuple(packed), width)


def _large(index: int, item: Item, region: int) -> Iterator[Round]:
    if item.straight:
        yield Round(Kind.STRAIGHT, (Chunk(index, 0, item.share),), 0)
        return
    for first in range(0, item.share, region):
        last = min(first + region, item.share)
        yield Round(Kind.SPLIT, (Chunk(index, first, last),), last - first)
