"""What torch's caching allocator reserves for a row of allocations: rounding, splitting and what it cannot give back.

[Note: reserved memory]
The allocator keeps what it has once taken from the driver. A request is rounded up to 512 bytes and served from the
smallest free block that is large enough, of which the rest is split off if it is worth it; without one, a new segment
is taken. Free neighbours of one segment are merged. Each stream has blocks of its own. So more is reserved than was
ever in use, most of all where large tensors come and go.

Source: c10/cuda/CUDACachingAllocator.cpp of torch (`round_size`, `get_allocation_size`, `should_split`).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

_MIB = 2**20
_ROUND = 512
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB  # requests up to it are served from segments of that size
_MEDIUM, _MEDIUM_SEGMENT = 10 * _MIB, 20 * _MIB
_LARGE_ROUND = 2 * _MIB


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A part of a segment."""

    size: int
    small: bool
    used: bool = False
    before: MemoryBlock | None = None
    behind: MemoryBlock | None = None


class CachingAllocator:
    """The memory of one stream."""

    def __init__(self) -> None:
        self.reserved = 0
        # Whether blocks are of small requests -> those that are free, in order of their size.
        self._free: dict[bool, list[MemoryBlock]] = {True: [], False: []}

    def allocate(self, nbytes: int) -> MemoryBlock:
        """Serve a request."""
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        small = size <= _SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, size, key=lambda block: block.size)
        block = free.pop(place) if place < len(free) else self._segment(size, small)
        if (rest := block.size - size) >= (_ROUND if small else _SMALL + 1):
            behind = MemoryBlock(rest, small, before=block, behind=block.behind)
            if block.behind is not None:
                block.behind.before = behind
            block.size, block.behind = size, behind
            self._keep(behind)
        block.used = True
        return block

    def release(self, block: MemoryBlock) -> None:
        """Take back what `allocate` returned."""
        block.used = False
        for other in (block.before, block.behind):
            if other is not None and not other.used:
                self._free[other.small].remove(other)
                block = _merged(other, block) if other.behind is block else _merged(block, other)
        self._keep(block)

    def _segment(self, size: int, small: bool) -> MemoryBlock:
        if small:
            taken = _SMALL_SEGMENT
        else:
            taken = _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _LARGE_ROUND) * _LARGE_ROUND
        self.reserved += taken
        return MemoryBlock(taken, small)

    def _keep(self, block: MemoryBlock) -> None:
        bisect.insort(self._free[block.small], block, key=lambda each: each.size)


def _merged(first: MemoryBlock, second: MemoryBlock) -> MemoryBlock:
    first.size, first.behind = first.size + second.size, second.behind
    if second.behind is not None:
        second.behind.before = first
    return first
