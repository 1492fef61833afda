"""A link between host and device that takes as long as the caller says, on the CPU: for offloaded shards.

[Note: emulated host]
On a CPU mesh the copies of offloaded shards cost a memory copy. While `emulated_host` is open each takes
`latency + bytes / bandwidth`, and those of one direction go one after the other, as on a copy engine of a GPU. As with
the emulated link only who waits for a copy sleeps; a thread of this process copies, and competes for cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fxshard import torch_private
from fxshard.testing.cpu_engine import CpuEngine
from fxshard.testing.link_engine import LinkTransfer, Move, Speed


@dataclass(frozen=True)
class EmulatedHost:
    """What `emulated_host` yields."""

    to_device: CpuEngine  # carries the copies of shards
    to_host: CpuEngine  # carries the copies of gradients

    @property
    def transfers(self) -> list[LinkTransfer]:
        """The copies so far, those to the device first; one is there once it has been waited for."""
        return [*self.to_device.transfers, *self.to_host.transfers]


@contextmanager
def emulated_host(*, gigabytes_per_s: float = math.inf, latency_us: float = 0.0) -> Iterator[EmulatedHost]:
    """Have copies of offloaded shards on the CPU take their time, in each direction; see [Note: emulated host]."""
    speed = Speed(gigabytes_per_s=gigabytes_per_s, latency_us=latency_us)
    host = EmulatedHost(CpuEngine(speed), CpuEngine(speed))
    library = torch.library.Library("fxshard", "IMPL")
    try:
        # Kernels for the CPU go before those that are for any device, for as long as the library lives.
        library.impl("copy_to_device", lambda shard, *_: _carry(host.to_device, "to_device", shard), "CPU")
        library.impl("copy_to_host", lambda gradient, *_: _carry(host.to_host, "to_host", gradient), "CPU")
        yield host
    finally:
        library._destroy()
        for engine in (host.to_device, host.to_host):
            engine.close()


def _carry(engine: CpuEngine, op: str, source: Tensor) -> Tensor:
    copy = torch.empty_like(source, requires_grad=False)
    moves = [Move(copy, source.detach())]
    torch_private.register_work(copy, engine.launch(op, source.nbytes, 0, moves, [copy]))
    return copy
