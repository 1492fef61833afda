"""One all_to_all that brings parts of tensors to owners, or back, as bytes: tensors of any dtype share a launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fxshard.runtime.matrix_owners import Team, Traveller, aligned


class PackedPart(NamedTuple):
    """A part of a tensor that goes to another rank, or comes from there."""

    peer: int
    view: Tensor  # that it is copied from or to

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer."""
        return aligned(self.view.numel() * self.view.element_size())


class RowExchange:
    """Parts on their way to owners (`inward`), or back; launched when it is made, until `finish`."""

    def __init__(self, team: Team, travellers: Sequence[Traveller], *, inward: bool) -> None:
        """Pack and launch; all ranks of the team make it alike."""
        self._work = cast(Any, None)
        sent, self._received, moves = list[PackedPart](), list[PackedPart](), False
        for split, owner, local, whole in travellers:
            moves |= split.parts.keys() != {owner}
            ranks = split.sources(owner) if inward else split.parts
            if owner != team.rank and team.rank in ranks:
                (sent if inward else self._received).append(PackedPart(owner, split.in_local(local)))
            for rank in ranks if owner == team.rank else ():
                view = split.in_whole(cast(Tensor, whole), rank)
                if rank != owner:
                    (self._received if inward else sent).append(PackedPart(rank, view))
                elif inward:
                    view.copy_(split.in_local(local))
                else:
                    split.in_local(local).copy_(view)
        if moves:
            device = travellers[0].local.device
            outgoing, sizes = self._buffer(team, sent, device)
            self._incoming, self._sizes = self._buffer(team, self._received, device)
            for part, place in _places(sent, sizes, outgoing):
                place.copy_(part.view)
            self._outgoing = outgoing  # until it has been sent
            self._work = dist.all_to_all_single(
                self._incoming, outgoing, self._sizes, sizes, group=team.group, async_op=True
            )

    @staticmethod
    def _buffer(team: Team, parts: Sequence[PackedPart], device: torch.device) -> tuple[Tensor, list[int]]:
        sizes = [0] * team.group.size()
        for part in parts:
            sizes[part.peer] += part.nbytes
        return torch.empty(sum(sizes), dtype=torch.uint8, device=device), sizes

    def finish(self) -> None:
        """Wait, and copy what has come to where it belongs."""
        if self._work is not None:
            self._work.wait()
            for part, place in _places(self._received, self._sizes, self._incoming):
                part.view.copy_(place)
            self._work = None
            del self._outgoing, self._incoming


def _places(parts: Sequence[PackedPart], sizes: Sequence[int], buffer: Tensor) -> Iterator[tuple[PackedPart, Tensor]]:
    """Yield where each part lies: by rank, and of a rank in the order of the list."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    for part in parts:
        view, at = part.view, starts[part.peer]
        yield part, buffer.narrow(0, at, view.numel() * view.element_size()).view(view.dtype).view(view.shape)
        starts[part.peer] += part.nbytes
