"""How much a launch should move: latency against size, and copies against tensors.

[Note: bucket sizes]
A launch that moves too little is all latency, of the link and of the rank that launches: `Limits.enough` is where it is
a tenth of the time. One that moves too much keeps what waits for it from starting: `Limits.most` is where latency is a
fortieth, so that halves of it would cost almost nothing more.

[Note: the two ends of a graph]
Nothing hides the first gather of a graph, and nothing its last reduction. So what they move should be no more than the
first node reads, and no more than the last one gives, as far as the link can use it well: there a launch is cut where
compute lies between, down to `Limits.enough`. In the middle it is cut only where another unit comes in between: the
root's embedding is read first and its head last. A frame that has a part of the model's units has no such ends: the
frame before gathers its first unit (`hand_off_prefetch`), the frame behind runs beside its last reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fxshard.cost.comm import transfer_seconds
from fxshard.errors import ConfigError
from fxshard.hardware import HardwareSpec

_T = TypeVar("_T")

MIB = 1 << 20

_ENOUGH, _MOST = 1 / 10, 1 / 40
"""Share of latency in the time of a launch."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes of the whole buffer that a launch should move."""

    enough: float  # a bucket is closed once it has that many
    most: float  # it never grows beyond, and what is larger is split, a single parameter excepted
    more: float = math.inf  # that are in memory at once besides those of a launch for each unit
    latency: float = 0.0  # seconds that a launch takes on the link which moves nothing

    @property
    def small(self) -> float:
        """What moves in less than a launch's latency, and so is worth none of its own."""
        return self.most * _MOST


def auto_limits(hardware: HardwareSpec, world_size: int) -> Limits:
    """Limits that follow from the link; see [Note: bucket sizes]. One rank sends nothing: there are none."""
    if world_size == 1:
        return Limits(enough=math.inf, most=math.inf)
    link = hardware.link(world_size)
    per_byte = (world_size - 1) / world_size / link.bandwidth
    latency = float(transfer_seconds("all_gather", 0, world_size, link))

    def nbytes(share: float) -> float:
        seconds = latency + hardware.launch_overhead
        return max(1.0, seconds * (1 / share - 1) / per_byte)  # what costs nothing moves something all the same

    return Limits(enough=nbytes(_ENOUGH), most=nbytes(_MOST), latency=latency)


def check(size: object) -> None:
    """Refuse what is no value of the option `bucket`."""
    if size in ("unit", "auto"):
        return
    if isinstance(size, bool | str) or not isinstance(size, int | float) or not 0 < size < math.inf:
        raise ConfigError(f'bucket must be "unit", "auto" or a positive number of MiB, got {size!r}.')


def limits_of(size: str | float, hardware: HardwareSpec, world_size: int) -> Limits:
    """Limits of the option `bucket`: a number of MiB, "auto", or "unit", which sets none."""
    if size == "unit":
        return Limits(enough=math.inf, most=math.inf)
    if isinstance(size, str):
        return auto_limits(hardware, world_size)
    return Limits(enough=size * MIB, most=size * MIB)


def copy_seconds(nbytes: float, hardware: HardwareSpec, *, is_kernel: bool = True) -> float:
    """Time to read and write `nbytes`, in a kernel of its own or as a part of another one."""
    return hardware.kernel_overhead * is_kernel + 2 * nbytes / hardware.memory_bandwidth


def split(things: Sequence[_T], nbytes: Callable[[_T], int], most: float) -> list[list[_T]]:
    """Cut a row of things into spans of about equal size, none above `most` unless one thing alone is.

    What moves in less than a launch's latency begins no span: a bias is read with the weight before it.
    """
    total = sum(map(nbytes, things))
    target, small = total / max(1, math.ceil(total / most)), most * _MOST
    spans: list[list[_T]] = []
    size = 0
    for thing in things:
        if not spans or (size >= target and nbytes(thing) > small) or size + nbytes(thing) > most:
            spans.append([])
            size = 0
        spans[-1].append(thing)
        size += nbytes(thing)
    return spans


def cut(
    things: Sequence[_T], nbytes: Callable[[_T], int], are_apart: Callable[[_T, _T], bool], least: float
) -> list[list[_T]]:
    """Cut a row of things wherever neighbours are apart, into spans of at least so many bytes, if there are as many."""
    spans: list[list[_T]] = []
    for i, thing in enumerate(things):
        if not spans or are_apart(things[i - 1], thing):
            spans.append([])
        spans[-1].append(thing)
    joined: list[list[_T]] = []
    for span in spans:
        if joined and min(sum(map(nbytes, span)), sum(map(nbytes, joined[-1]))) < least:
            joined[-1] += span
        else:
            joined.append(span)
    return joined


def merge(
    things: Sequence[_T], nbytes: Callable[[_T], int], limits: Limits, may_join: Callable[[Sequence[_T], _T], bool]
) -> list[list[_T]]:
    """Fill buckets in order, as full as `limits` say, with things of which each `may_join` those that are there."""
    buckets: list[list[_T]] = []
    size = 0
    for thing in things:
        if buckets and size < limits.enough and size + nbytes(thing) <= limits.most and may_join(buckets[-1], thing):
            buckets[-1].append(thing)
            size += nbytes(thing)
        else:
            buckets.append([thing])
            size = nbytes(thing)
    return buckets
