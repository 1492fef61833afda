"""What the prefetcher launches: the gather of parts of a unit's flat, alone or together with others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fxshard.runtime import profiler_ranges, streams

if TYPE_CHECKING:
    from fxshard.runtime.unit import Unit

_c10d = torch.ops._c10d_functional

Key = tuple[int, torch.dtype, tuple[tuple[int, int], ...]]
"""What tells a request from others: address of the flat, dtype, parts."""


class Guess(NamedTuple):
    """How much to launch of what is guessed; see `passes/hand_off_prefetch.py`."""

    nbytes: int  # unsharded bytes that are enough for one launch; 0 to guess nothing
    peak_share: float | None  # of the largest unit: how much may be launched early for it; `None` for no limit


class AllGatherRequest(NamedTuple):
    """One all_gather of parts of a flat."""

    unit: Unit | None  # for which, `None` for a flat that belongs to none
    flat: Tensor  # this rank's shard, `[shard_numel]`
    dtype: torch.dtype  # in which it is sent
    parts: tuple[tuple[int, int], ...]  # (first element, number of elements) of each tensor that is sent
    world_size: int  # ranks
    group: str  # name of their process group
    stream: str = ""  # on which it is cast and launched; empty for the current one
    guess: Guess = Guess(0, None)  # what may be launched behind it where no list of the user says so

    @property
    def key(self) -> Key:
        """What tells it from others."""
        return self.flat.data_ptr(), self.dtype, self.parts

    @property
    def link(self) -> tuple[object, ...]:
        """What it shares with others that can be launched together with it."""
        return self.dtype, self.group, self.stream, self.flat.device

    @property
    def sizes(self) -> tuple[object, ...]:
        """What a launch must have in common with that of another rank which it meets."""
        return self.dtype, self.world_size, [numel for _, numel in self.parts]

    @property
    def nbytes(self) -> int:
        """Of what it gathers, on each rank."""
        return self.world_size * sum(numel for _, numel in self.parts) * self.dtype.itemsize


def launch(*requests: AllGatherRequest) -> list[list[Tensor]]:
    """Start requests of one `link` together; each result is `[world_size * numel]`, to be waited for."""
    first = requests[0]
    flats = [request.flat.detach() for request in requests]
    joiner = streams.copy_out_stream(first.stream, flats[0].device)
    names = ", ".join(request.unit.label for request in requests if request.unit is not None)
    with profiler_ranges.of_unit(names), streams.on_side_stream(first.stream, flats[0].device):
        cast_flats = streams.cast_to_send(flats, first.dtype, joiner)
        parts = [
            flat[start : start + numel]
            for request, flat in zip(requests, cast_flats, strict=True)
            for start, numel in request.parts
        ]
        if len(parts) == 1:
            return [[_c10d.all_gather_into_tensor(parts[0], first.world_size, first.group)]]
        results = iter(_c10d.all_gather_into_tensor_coalesced(parts, first.world_size, first.group))
    return [[next(results) for _ in request.parts] for request in requests]
