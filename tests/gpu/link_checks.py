"""Whether an emulated link on a GPU keeps its speed, and what it takes from matrix products that run beside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import Event, Stream

from fxshard.testing.emulated_link import EmulatedLink

if TYPE_CHECKING:
    from fxshard.testing.cuda_engine import CudaEngine  # it needs triton

SIZES = tuple(mib * 2**20 for mib in (1, 4, 16, 64, 256, 512))
"""Of the tensors that are gathered, in bytes."""

GEMM = 8192
"""Rows and columns of the matrices that are multiplied beside the link, in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class PaceCheck:
    """How long an all_gather took."""

    bytes: int  # of the gathered tensor
    is_busy: bool  # whether matrices were multiplied meanwhile
    asked_us: float  # by the formula of the link
    paced_us: float  # from when the last thread block had room on an SM, by the clock of the kernel
    # from when its turn in the stream had come, by CUDA events: launching and waiting for room count
    measured_us: float

    @property
    def error(self) -> float:
        """Of the pace, relative to what was asked."""
        return self.paced_us / self.asked_us - 1


@dataclass(frozen=True, kw_only=True)
class GemmSlowdown:
    """What the link takes from a matrix product beside it."""

    ctas: int  # thread blocks that copied
    alone_us: float  # a product, while nothing else ran
    beside_us: float  # a product, while the link gathered

    @property
    def ratio(self) -> float:
        """How many times as long a product took beside the link."""
        return self.beside_us / self.alone_us


def check_pace(link: EmulatedLink, gigabytes_per_s: float, repeats: int = 5) -> list[PaceCheck]:
    """Gather tensors of each size on an idle GPU and beside matrix products; the median of `repeats` counts."""
    with _at_speed(link, gigabytes_per_s, None) as engine:
        product = _product(engine.device)
        product_us = _timed_us(product, 10)
        beside = Stream(engine.device)
        found = []
        for size in SIZES:
            whole, shard = _gathered(link, size, engine.device)
            asked_us = engine.speed.seconds("all_gather", whole.nbytes, link.mesh.size()) * 1e6
            for is_busy in (False, True):
                count = math.ceil(2 * asked_us / product_us) + 2 if is_busy else 0
                taken = [_gather_once(link, engine, whole, shard, beside, product, count) for _ in range(repeats + 1)]
                paced_us, measured_us = (statistics.median(column) for column in zip(*taken[1:], strict=True))
                found.append(
                    PaceCheck(
                        bytes=whole.nbytes,
                        is_busy=is_busy,
                        asked_us=asked_us,
                        paced_us=paced_us,
                        measured_us=measured_us,
                    )
                )
        return found


def gemm_slowdown(link: EmulatedLink, ctas: int, products: int) -> GemmSlowdown:
    """Multiply so many matrices alone and while the link gathers, one all_gather after the other."""
    with _at_speed(link, 25.0, ctas) as engine:
        product = _product(engine.device)
        whole, shard = _gathered(link, SIZES[-1], engine.device)
        dist.all_gather_into_tensor(whole, shard)  # compiles what has not been compiled
        _timed_us(product, products)
        alone_us = _timed_us(product, products)
        gather_us = engine.speed.seconds("all_gather", whole.nbytes, link.mesh.size()) * 1e6
        count = math.ceil(2 * products * alone_us / gather_us) + 1
        works = [dist.all_gather_into_tensor(whole, shard, async_op=True) for _ in range(count)]
        beside_us = _timed_us(product, products)
        for work in works:
            cast(Any, work).wait()
        torch.cuda.synchronize(engine.device)
    return GemmSlowdown(ctas=ctas, alone_us=alone_us, beside_us=beside_us)


@contextmanager
def _at_speed(link: EmulatedLink, gigabytes_per_s: float, ctas: int | None) -> Iterator[CudaEngine]:
    engine = cast("CudaEngine", link.engine)
    before, ctas_before = engine.speed, engine.ctas
    link.set_speed(gigabytes_per_s=gigabytes_per_s, latency_us=30.0, ctas=ctas)
    try:
        yield engine
    finally:
        engine.set_speed(before, ctas_before)
        link.clear()


def _gather_once(
    link: EmulatedLink,
    engine: CudaEngine,
    whole: Tensor,
    shard: Tensor,
    beside: Stream,
    product: Callable[[], None],
    count: int,
) -> tuple[float, float]:
    """Return how long an all_gather was paced and took, beside so many products, in us."""
    torch.cuda.synchronize(engine.device)
    link.clear()
    with torch.cuda.stream(beside):
        for _ in range(count):
            product()
    product()  # while it runs, the host launches: else the events would measure that, too
    dist.all_gather_into_tensor(whole, shard)
    (transfer,) = link.transfers
    return engine.paced_us(), transfer.end_us - transfer.start_us


def _gathered(link: EmulatedLink, num_bytes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make a tensor of about so many bytes, and a shard of it."""
    rows = link.mesh.size()
    shard = torch.zeros(-(-num_bytes // (64 * rows)) * 16, dtype=torch.float32, device=device)
    return torch.empty(rows * shard.numel(), dtype=shard.dtype, device=shard.device), shard


def _product(device: torch.device) -> Callable[[], None]:
    left, right, out = (torch.randn(GEMM, GEMM, device=device, dtype=torch.bfloat16) for _ in range(3))

    def run() -> None:
        torch.mm(left, right, out=out)

    return run


def _timed_us(product: Callable[[], None], count: int) -> float:
    """Time one of so many products, by CUDA events in the current stream, in us."""
    product()
    begin, end = (Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        product()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / count
