"""How to cut what a launch moves: copies against tensors, latency against size.

[Note: cuts]
A gathered tensor with several parameters in it must be copied out, one gradient buffer for several must be copied in.
A launch can send several tensors instead (coalesced), and a tensor with one parameter in it needs no copy; but every
further tensor costs the launch something. `cut_in_row` and `cut_freely` find the cheapest cut.

A launch that moves too little is all latency: `Limits.enough` is where latency is a tenth of its time. One that moves
too much keeps what waits for it from starting: `Limits.most` is where latency is a fortieth, so that halves of it would
cost almost nothing more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxshard.cost.hardware import HardwareSpec

_ENOUGH, _MOST = 1 / 10, 1 / 40
"""Share of latency in the time of a launch."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which of n things travel together as one tensor.

    Attributes:
        groups: indices, each once; the order within a group is the given one.
        copies: seconds spent on copying things in or out of tensors that they share.
        tensors: seconds that the tensors after the first cost.
    """

    groups: tuple[tuple[int, ...], ...]
    copies: float
    tensors: float

    @property
    def seconds(self) -> float:
        """What the cut costs."""
        return self.copies + self.tensors


def uncut(copy_seconds: Sequence[float]) -> Cut:
    """Everything in one tensor; one thing alone needs no copy."""
    copies = sum(copy_seconds) if len(copy_seconds) > 1 else 0.0
    return Cut(groups=(tuple(range(len(copy_seconds))),), copies=copies, tensors=0.0)


def cut_in_row(copy_seconds: Sequence[float], tensor_seconds: float) -> Cut:
    """The cheapest cut into groups of neighbours; linear in their number.

    Args:
        copy_seconds: what copying each thing costs if it shares a tensor.
        tensor_seconds: what each tensor after the first costs.
    """
    # Up to each thing: the least cost with the last group closed there, and with one that may go on.
    closed, running, running_start = [-tensor_seconds], float("inf"), 0
    starts: list[int] = []  # of the last group, in the cheapest way that is closed at each thing
    for i, copy in enumerate(copy_seconds):
        begin = closed[i] + tensor_seconds
        running, running_start = min((running + copy, running_start), (begin + copy, i))
        closed.append(min(begin, running))
        starts.append(i if begin <= running else running_start)
    groups: list[tuple[int, ...]] = []
    end = len(copy_seconds)
    while end:
        groups.append(tuple(range(starts[end - 1], end)))
        end = starts[end - 1]
    return _cut(groups[::-1], copy_seconds, tensor_seconds)


def cut_freely(copy_seconds: Sequence[float], tensor_seconds: float) -> Cut:
    """The cheapest cut into any groups: what is dear to copy alone, the rest together.

    Args:
        copy_seconds: what copying each thing costs if it shares a tensor.
        tensor_seconds: what each tensor after the first costs.
    """
    alone = [i for i, copy in enumerate(copy_seconds) if copy > tensor_seconds]
    rest = tuple(i for i, copy in enumerate(copy_seconds) if copy <= tensor_seconds)
    return _cut([*([rest] if rest else []), *((i,) for i in alone)], copy_seconds, tensor_seconds)


def _cut(groups: Sequence[tuple[int, ...]], copy_seconds: Sequence[float], tensor_seconds: float) -> Cut:
    shared = itertools.chain.from_iterable(group for group in groups if len(group) > 1)
    copies = sum(copy_seconds[i] for i in shared)
    return Cut(groups=tuple(groups), copies=copies, tensors=tensor_seconds * (len(groups) - 1))


def together(cuts: Sequence[Cut]) -> Cut:
    """Several cuts as one: what one launch with all of their tensors costs."""
    return Cut(
        groups=tuple(itertools.chain.from_iterable(cut.groups for cut in cuts)),
        copies=sum(cut.copies for cut in cuts),
        tensors=sum(cut.tensors for cut in cuts),
    )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes of the whole buffer that a launch should move.

    Attributes:
        enough: a bucket is closed once it has that many.
        most: it never grows beyond, and what is larger is split, a single parameter excepted.
    """

    enough: float
    most: float


def auto_limits(hardware: HardwareSpec, world_size: int) -> Limits:
    """Limits that follow from the link; see [Note: cuts]."""
    per_byte = (world_size - 1) / world_size / hardware.link_bandwidth

    def nbytes(share: float) -> float:
        return hardware.link_latency * (1 / share - 1) / per_byte

    return Limits(enough=nbytes(_ENOUGH), most=nbytes(_MOST))


def copy_seconds(nbytes: float, hardware: HardwareSpec) -> float:
    """Time to read and write `nbytes` in one kernel."""
    return hardware.kernel_overhead + 2 * nbytes / hardware.memory_bandwidth


def split(sizes: Sequence[float], most: float) -> list[list[int]]:
    """Cut a row of things into stretches of about equal size, none above `most` unless one thing alone is."""
    total = sum(sizes)
    target = total / max(1, math.ceil(total / most))
    stretches: list[list[int]] = []
    size = 0.0
    for i, thing in enumerate(sizes):
        if not stretches or size >= target or size + thing > most:
            stretches.append([])
            size = 0.0
        stretches[-1].append(i)
        size += thing
    return stretches


def merge(sizes: Sequence[float], limits: Limits, may_join: Callable[[list[int], int], bool]) -> list[list[int]]:
    """Fill buckets in order.

    Args:
        sizes: bytes.
        limits: how full.
        may_join: whether a thing may join a bucket of others.
    """
    found: list[list[int]] = []
    size = 0.0
    for i, thing in enumerate(sizes):
        if found and size < limits.enough and size + thing <= limits.most and may_join(found[-1], i):
            found[-1].append(i)
            size += thing
        else:
            found.append([i])
            size = thing
    return found
