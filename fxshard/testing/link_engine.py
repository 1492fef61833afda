"""What the engines of an emulated link have in common: speed, moves and transfers; see [Note: emulated link]."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.multiprocessing.reductions import StorageWeakRef

from fxshard.errors import ConfigError


class LinkTransfer(NamedTuple):
    """What the link has carried."""

    op: str  # the collective, such as "all_gather"
    bytes: int  # of all tensors, unsharded
    start_us: float  # when the link began, after it was made
    end_us: float  # when the data had arrived
    expected_us: float = 0.0  # how long it should have taken


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How long the link takes; `ConfigError` if a number means nothing."""

    gigabytes_per_s: float = math.inf  # of each rank's link, in 1e9 bytes
    latency_us: float = 0.0  # of each collective

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ConfigError(f"emulated_link: {name} must be a number, got {value!r}.")
        if not self.gigabytes_per_s > 0:
            raise ConfigError(f"emulated_link: gigabytes_per_s must be positive, got {self.gigabytes_per_s!r}.")
        if not 0 <= self.latency_us < math.inf:
            raise ConfigError(f"emulated_link: latency_us must be finite and not negative, got {self.latency_us!r}.")

    @property
    def is_instant(self) -> bool:
        """Whether it takes no time at all."""
        return self.gigabytes_per_s == math.inf and self.latency_us == 0.0

    def seconds(self, op: str, num_bytes: int, num_ranks: int) -> float:
        """Return the time of a collective over tensors that have so many bytes when they are whole; of a copy for 0."""
        share = (num_ranks - 1) / num_ranks if num_ranks else 1
        sent = num_bytes * (2 if op == "all_reduce" else 1) * share
        return self.latency_us * 1e-6 + sent / (self.gigabytes_per_s * 1e9)


class Move(NamedTuple):
    """What a collective does to one pair of tensors of this rank, whose peers hold the same."""

    output: Tensor  # written; of any shape with `writes` times the elements of a chunk of `source`
    source: Tensor  # read; `reads` equal chunks, one after the other
    scale: float | Tensor = 1  # the chunk is multiplied by it
    power: int = 1  # the chunk is raised to it instead
    reads: int = 1  # how many chunks `source` has, all of which a link would send
    own: int = 0  # the chunk that is this rank's, and written
    writes: int = 1  # how often it is written, one after the other

    def run(self) -> None:
        """Do it on the device of the tensors, in the current stream."""
        source = self.source
        chunk = source if self.reads == 1 else source.reshape(self.reads, source.numel() // self.reads)[self.own]
        if self.writes > 1:
            many = self.output.view(self.writes, chunk.numel())
            many.copy_(chunk.reshape(1, -1).expand(self.writes, -1))
            return
        chunk = chunk.reshape(self.output.shape)  # no broadcasting
        if self.power != 1:
            torch.pow(chunk, self.power, out=self.output)
        elif isinstance(self.scale, Tensor) or self.scale != 1:
            torch.mul(chunk, self.scale, out=self.output)
        else:
            self.output.copy_(chunk)


class GatheredBytes:
    """Counts the memory of what all_gathers brought, by storages that are alive.

    Attributes:
        most: bytes that were alive at once.
    """

    def __init__(self) -> None:
        self.most = 0
        self._alive: list[tuple[StorageWeakRef, int]] = []

    def add(self, outputs: Iterable[Tensor]) -> None:
        """Count what a launch is about to fill."""
        storages = [output.untyped_storage() for output in outputs]
        self._alive = [each for each in self._alive if not each[0].expired()]
        self._alive += [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]
        self.most = max(self.most, sum(nbytes for _, nbytes in self._alive))


class Engine(Protocol):
    """Carries transfers; one per kind of device."""

    speed: Speed  # of what is launched from now on
    devices: tuple[str, ...]  # the types of device whose tensors it can move

    @property
    def transfers(self) -> list[LinkTransfer]:
        """What has arrived, in the order of the link."""

    def launch(self, op: str, num_bytes: int, num_ranks: int, moves: Sequence[Move], outputs: Sequence[Tensor]) -> Work:
        """Start the moves, which fill `outputs`; their tensors live until the work has been waited for."""

    def set_speed(self, speed: Speed, ctas: int | None) -> None:
        """Change the speed of what is launched from now on; `ctas` if it has any."""

    def clear(self) -> None:
        """Forget the transfers so far."""

    def close(self) -> None:
        """Carry what has been launched and stop."""


@dataclass(frozen=True)
class Links:
    """What connects the ranks: one link, or one within each machine and another between machines."""

    within: Engine
    between: Engine | None = None
    ranks_per_machine: int = 0  # if there is a link between them
    gathered: GatheredBytes = field(default_factory=GatheredBytes)  # of all groups

    def of(self, ranks: Sequence[int]) -> Engine:
        """The link of a group: that between machines if its ranks are on several."""
        if self.between is None or len({rank // self.ranks_per_machine for rank in ranks}) == 1:
            return self.within
        return self.between

    @property
    def engines(self) -> list[Engine]:
        """All of them."""
        return [self.within] if self.between is None else [self.within, self.between]
