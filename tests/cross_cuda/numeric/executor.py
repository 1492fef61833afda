"""Run what was queued on mock streams, in an order that forks, joins and events allow.

Whatever the clocks of `tests.cross_cuda.clocks` call ordered is ordered here, and nothing else.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.cross_cuda.clocks import Clock, Work

POISON = "poison"  # makes memory NaN that was freed
ALLOCATOR = "allocator"  # is no stream: nobody waits for what it does, which comes as early as it may


class Item(NamedTuple):
    """Something that a stream was given."""

    stream: str
    time: int  # by the stream's own clock
    needs: Clock  # stream -> all of its items up to this time come first
    name: str
    work: Work
    reads: frozenset[int] = frozenset()  # shadows, by number
    writes: frozenset[int] = frozenset()

    def conflicts(self, other: Item) -> bool:
        """Whether the order of two items matters."""
        return not (self.writes.isdisjoint(other.writes | other.reads) and self.reads.isdisjoint(other.writes))

    def is_behind(self, earlier: Item) -> bool:
        """Whether something that was given before it comes first in every order."""
        if ALLOCATOR not in (self.stream, earlier.stream) and self.stream == earlier.stream:
            return True
        return self.needs.get(earlier.stream, 0) >= earlier.time


Order = Callable[[Sequence[Item]], Item]
"""Picks the next of the items that may run now, one of each stream; they stand in the order in which streams began."""


def first(*streams: str) -> Order:
    """Run as much as can run on the first of these streams, then on the second; others only where these wait."""

    def pick(ready: Sequence[Item]) -> Item:
        return min(ready, key=lambda item: streams.index(item.stream) if item.stream in streams else len(streams))

    return pick


def drawn(seed: int) -> Order:
    """Draw the next one, from streams that are now faster and now slower."""
    rng, speeds = random.Random(seed), dict[str, float]()

    def pick(ready: Sequence[Item]) -> Item:
        if rng.random() < 0.05:
            speeds.clear()
        return max(ready, key=lambda item: speeds.setdefault(item.stream, rng.random()) * (0.2 + rng.random()))

    return pick


def reversing(early: Item, late: Item) -> Order:
    """Run an item right behind another one that was given later, and both as late as can be."""
    has_run = False

    def pick(ready: Sequence[Item]) -> Item:
        nonlocal has_run
        wanted = (early, late) if has_run else (late, early)
        of_both = [item for one in wanted for item in ready if item is one]
        others = [item for item in ready if item is not early and item is not late]
        picked = of_both[0] if has_run and of_both else [*others, *of_both][0]
        has_run = has_run or picked is late
        return picked

    return pick


def unordered(items: Sequence[Item]) -> list[tuple[Item, Item]]:
    """Return all pairs of items that touch the same memory in an order that nothing says: what clocks call races."""
    of_shadow: dict[int, list[Item]] = {}
    for item in items:
        for number in item.reads | item.writes:
            of_shadow.setdefault(number, []).append(item)
    pairs = {
        (id(one), id(other)): (one, other)
        for touching in of_shadow.values()
        for one, other in itertools.combinations(touching, 2)
        if one.conflicts(other) and not other.is_behind(one)
    }
    return [*pairs.values()]


def run_all(items: Sequence[Item], order: Order) -> list[str]:
    """Run all items; return their streams in the order in which they ran."""
    queues: dict[str, deque[Item]] = {}
    for i, item in enumerate(items):
        queues.setdefault(f"{ALLOCATOR} {i}" if item.stream == ALLOCATOR else item.stream, deque()).append(item)
    ran = []
    while queues:
        ready = [queue[0] for queue in queues.values() if _may_run(queue[0], queues)]
        if not ready:
            raise AssertionError(f"streams wait for each other: {[queue[0][:4] for queue in queues.values()]}")
        of_allocator = [item for item in ready if item.stream == ALLOCATOR]
        for item in of_allocator or [order(ready)]:
            (name,) = [name for name, queue in queues.items() if queue[0] is item]
            queues[name].popleft()
            if not queues[name]:
                del queues[name]
            item.work()
            ran.append(item.stream)
    return ran


def _may_run(item: Item, queues: dict[str, deque[Item]]) -> bool:
    waits_for = (name for name in item.needs if name != item.stream and name in queues)
    return all(queues[name][0].time > item.needs[name] for name in waits_for)
