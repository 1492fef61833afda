"""Move the rounds of [Note: how full state travels]: to one rank, to all ranks, and from one rank back to all.

Everything travels as bytes, so a bucket holds any mix of dtypes, and no collective sees more than one.

[Note: rounds under way]
A round is started before those ahead of it are finished: two with a bucket, each with one of its own, two with rows
that had to be copied because they are not contiguous, and any number with neither. On an accelerator that is what
overlaps them: the copy out of one bucket is queued behind its own transfer alone, while the next transfer runs on the
stream of the process group. Where a bucket is used again, the process group waits for what was queued before, so no
stream or event of ours is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fxshard.runtime.raw import as_bytes
from fxshard.state.rounds import Chunk, Item, Round

# torch 2.13 renamed it, and warns about the old name.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_MOST_UNDER_WAY = 32

Progress = Callable[[int], None]
"""Told how many bytes have arrived."""


def part(tensor: Tensor, first: int, last: int) -> Tensor:
    """Bytes `first` to `last` of a tensor, in order: its own memory if it is contiguous, else a copy of rows around."""
    if tensor.is_contiguous():
        return as_bytes(tensor)[first:last]
    row = tensor[0].nbytes
    start = first // row
    return as_bytes(tensor[start : -(-last // row)])[first - start * row : last - start * row]


@dataclass(eq=False)
class Wire:
    """The ranks that share tensors, and what this rank may take for it.

    Attributes:
        group: the ranks.
        device: where its collectives work.
        rank: this one's, in the group.
        world_size: of the group.
    """

    group: dist.ProcessGroup
    device: torch.device
    rank: int = field(init=False)
    world_size: int = field(init=False)

    def __post_init__(self) -> None:
        """Look up this rank."""
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)

    def send(self, tensor: Tensor, peer: int) -> dist.P2POp:
        """To be launched: send to `peer` of the group."""
        return dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer)

    def receive(self, tensor: Tensor, peer: int) -> dist.P2POp:
        """To be launched: receive from `peer` of the group."""
        return dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer)

    def all_gather(self, gathered: Tensor, own: Tensor) -> dist.Work:
        """Launch an all_gather; `own` may be this rank's part of `gathered`."""
        return cast(dist.Work, _ALL_GATHER(gathered, own, group=self.group, async_op=True))

    def here(self, tensor: Tensor) -> Tensor:
        """The tensor where collectives work."""
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
        self._device = device
        self._buckets: list[Tensor] = []
        self._turn = 0

    def next(self, nbytes: int) -> Tensor:
        """The first `nbytes` of the bucket whose turn it is."""
        if len(self._buckets) < 2:
            self._buckets.append(torch.empty(self._nbytes, dtype=torch.uint8, device=self._device))
        self._turn += 1
        return self._buckets[(self._turn - 1) % len(self._buckets)][:nbytes]


@dataclass(eq=False)
class UnderWay:
    """A round that was started."""

    round: Round
    works: list[Any]
    bucket: Tensor | None = None
    kept: Any = None  # what must live until the works are done
    is_copy: bool = False  # whether that is memory of its own, beside buckets

    def wait(self) -> None:
        """Wait until what was launched for it is done."""
        for work in self.works:
            work.wait()


def run(rounds: Iterable[Round], start: Callable[[Round], UnderWay], finish: Callable[[UnderWay], None]) -> None:
    """Run all rounds; see [Note: rounds under way]."""
    waiting: deque[UnderWay] = deque()
    for each in rounds:
        while len(waiting) == _MOST_UNDER_WAY or _is_full(waiting, each):
            finish(waiting.popleft())
        waiting.append(start(each))
    while waiting:
        finish(waiting.popleft())


def _is_full(waiting: Iterable[UnderWay], each: Round) -> bool:
    """Whether a round must be finished before the next is started, for the memory that those under way take."""
    num_buckets, num_copies = sum(1 for x in waiting if x.round.width), sum(x.is_copy for x in waiting)
    return (each.width > 0 and num_buckets == 2) or num_copies == 2


def launched(ops: list[dist.P2POp]) -> list[Any]:
    """Launch sends and receives together."""
    return list(dist.batch_isend_irecv(ops)) if ops else []


def lengths(items: Sequence[Item], chunks: Iterable[Chunk], rank: int) -> list[int]:
    """Bytes that `rank` has of each chunk."""
    held = [(items[i].nbytes - rank * items[i].share, first, last) for i, first, last in chunks]
    return [last - first if last <= nbytes else max(0, nbytes - first) for nbytes, first, last in held]
