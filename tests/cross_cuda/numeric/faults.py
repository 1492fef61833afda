"""Faults that are put into two steps of training, and what finds them: the clocks, or the numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.cross_cuda.clocks import Seeded
from tests.cross_cuda.numeric.apart import Apart
from tests.cross_cuda.numeric.computed import Computed, Recorded
from tests.cross_cuda.numeric.executor import POISON, Item, Order, first, reversing, unordered
from tests.cross_cuda.numeric.reference import Values

WAITS = ("fork", "join", "synchronize")  # may be left out, and come one op too late
MAX_ORDERS = 6  # in which the numbers look for a fault


class Verdict(NamedTuple):
    """What has found a fault."""

    fault: str
    num_races: int  # that the clocks found
    num_unordered: int  # pairs of items that touch the same memory in no order, by a comparison of all of them
    by_numbers: bool  # whether losses, gradients or parameters are not what they are without it, to the bit

    @property
    def found_by(self) -> str:
        """Name who found it; where no order of two items has changed that matters, it is none."""
        found = [name for name, by in (("clocks", self.num_races), ("numbers", self.by_numbers)) if by]
        return " and ".join(found) or ("neither" if self.num_unordered else "no fault")


def faults_of(clean: Recorded) -> Iterator[Seeded]:
    """Yield every fault that can be put in once: each wait, event, record and free."""
    for kind, count in clean.count.items():
        for number, moved in itertools.product(range(count), (False, True) if kind in WAITS else (False,)):
            yield Seeded(kind, number, moved)


class Judge:
    """Looks for faults in a case."""

    def __init__(self, computed: Computed | Apart) -> None:
        self.computed = computed
        self.clean = computed.record()
        self._values = _bits(self.clean.computed(first()))

    @property
    def ops(self) -> list[int]:
        """Places of all items without a fault that compute anything."""
        return [i for i, item in enumerate(self.clean.items) if item.name != POISON]

    def is_same(self, recorded: Recorded, order: Order, items: Sequence[Item] | None = None) -> bool:
        """Whether an order gives the same bits as the case without a fault."""
        try:
            values = _bits(recorded.computed(order, items))
        except (AssertionError, LookupError, RuntimeError, ValueError):  # as of an index that is none
            return False
        return all(map(torch.equal, values, self._values))

    def seeded(self, fault: Seeded) -> Verdict:
        """Leave a wait out, or put it behind the next op, and look in orders that make the most of it."""
        faulty = self.computed.record(fault)
        pairs = unordered(faulty.items)
        orders = [reversing(*pair) for pair in _spread(pairs, MAX_ORDERS)]
        if not orders and _program(faulty.items) != _program(self.clean.items):
            orders = [first()]
        found = not all(self.is_same(faulty, order) for order in orders)
        name = f"{fault.forgets} {fault.only}, {'moved' if fault.moved else 'left out'}"
        return Verdict(name, len(faulty.races), len(pairs), found)

    def without(self, number: int) -> Verdict:
        """Leave out an item: its stream is not given it."""
        items = list(self.clean.items)
        items[number] = items[number]._replace(work=lambda: None)
        return self._of_items(f"{items[number].name}, left out", items)

    def exchanged(self, number: int) -> Verdict | None:
        """Exchange an item with the next one of its stream; nothing where their order does not matter."""
        items, one = list(self.clean.items), self.clean.items[number]
        place = next((i for i in self.ops if i > number and items[i].stream == one.stream), None)
        if place is None or not one.conflicts(items[place]):
            return None
        other = items[place]
        items[number] = other._replace(time=one.time, needs=one.needs)
        items[place] = one._replace(time=other.time, needs=other.needs)
        return self._of_items(f"{one.name} and {other.name}, exchanged", items)

    def _of_items(self, name: str, items: Sequence[Item]) -> Verdict:
        return Verdict(name, 0, 0, not self.is_same(self.clean, first(), items))


def _program(items: Sequence[Item]) -> list[tuple[str, frozenset[int], frozenset[int]]]:
    """Return what is computed; where it is the same, and no pair is unordered, every order gives the same."""
    return [(item.name, item.reads, item.writes) for item in items]


def _bits(values: Values) -> list[Tensor]:
    """Return values so that a NaN is equal to itself."""
    return [part.contiguous().view(torch.uint8) for parts in values.values() for part in map(torch.atleast_1d, parts)]


def _spread(pairs: Sequence[tuple[Item, Item]], number: int) -> Sequence[tuple[Item, Item]]:
    """Pick some from all over."""
    return pairs[:: max(1, -(-len(pairs) // number))]
