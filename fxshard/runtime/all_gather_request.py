"""What the prefetcher launches: the gather of parts of a unit's flat."""

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


class AllGatherRequest(NamedTuple):
    """One all_gather of parts of a flat."""

    unit: Unit | None  # for which, `None` for a flat that belongs to none
    flat: Tensor  # this rank's shard, `[shard_numel]`
    dtype: torch.dtype  # in which it is sent
    parts: tuple[tuple[int, int], ...]  # (first element, number of elements) of each tensor that is sent
    world_size: int  # ranks
    group: str  # name of their process group
    stream: str = ""  # on which it is cast and launched; empty for the current one
    guess: bool = False  # whether it may be launched where no list of the user says so

    @property
    def key(self) -> Key:
        """What tells it from others."""
        return self.flat.data_ptr(), self.dtype, self.parts

    @property
    def sizes(self) -> tuple[object, ...]:
        """What a launch must have in common with that of another rank which it meets."""
        return self.dtype, self.world_size, [numel for _, numel in self.parts]

    def launch(self) -> list[Tensor]:
        """Start it; each result is `[world_size * numel]`, to be waited for."""
        flat = self.flat.detach()
        joiner = streams.copy_out_stream(self.stream, flat.device)
        name = self.unit.fqn if self.unit is not None else ""
        with profiler_ranges.of_unit(name), streams.on_side_stream(self.stream, flat.device):
            (sent,) = streams.cast_to_send([flat], self.dtype, joiner)
            inputs = [sent[start : start + numel] for start, numel in self.parts]
            if len(inputs) == 1:
                return [_c10d.all_gather_into_tensor(inputs[0], self.world_size, self.group)]
            return list(_c10d.all_gather_into_tensor_coalesced(inputs, self.world_size, self.group))
