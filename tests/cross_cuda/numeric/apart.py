"""Ranks that each run code of their own: compiled, recorded and queued one by one, and computed together.

Where code differs by rank (uneven rows, subgroups, DTensors that are cut along another dimension) one recording cannot
stand for all. Then each rank has streams of its own, and a collective becomes two items on each of them: it sends, and
it receives, once all ranks of the group have sent. So ranks whose streams run in different orders are computed, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.cross_cuda.clocks import NO_FAULT, Seeded
from tests.cross_cuda.numeric.computed import Recorded, compiled
from tests.cross_cuda.numeric.exchanges import Collective, Parts
from tests.cross_cuda.numeric.executor import ALLOCATOR, Item
from tests.cross_cuda.numeric.reference import Errors, Reference, Values
from tests.cross_cuda.training import Case, ranks

_MOST_SHADOWS = 1_000_000  # of a rank


class Apart:
    """A case that is compiled and recorded for each rank."""

    def __init__(self, case: Case) -> None:
        self.case, self.reference = case, Reference(case)
        recordings = []
        for rank in range(case.world_size):
            with compiled(case, self.reference, rank) as computed:
                recordings.append(computed.record())
                self._owners = dict(computed.training.model.named_parameters())
        self._recorded = _together(recordings)

    def record(self, seeded: Seeded = NO_FAULT) -> Recorded:
        """Return the two steps of all ranks."""
        assert seeded == NO_FAULT, "the code of the other ranks is gone"
        return self._recorded

    def errors(self, values: Values) -> dict[str, Errors]:
        """Compare with unsharded training."""
        with ranks(self.case):  # whose meshes say who has which rows
            return self.reference.errors(values, self._owners)


@dataclass
class _Meeting:
    """A collective of a group."""

    sent: dict[int, Parts]  # by rank
    items: dict[int, Item]  # by rank, how it was recorded

    def items_of(self, rank: int) -> list[Item]:
        """Return what the rank's stream is given in the place of the collective."""
        item = self.items[rank]
        (call,) = item.work.calls  # type: ignore[attr-defined] # of a collective
        if self.items.keys() != {*call.group} or len({one.name for one in self.items.values()}) > 1:
            raise AssertionError(f"ranks {call.group} meet in {[(rank, one.name) for rank, one in self.items.items()]}")

        def send() -> None:
            if rank in self.sent:  # by what was computed before
                self.sent.clear()
            self.sent[rank] = [part.clone() for part in call.sent]

        def receive() -> None:
            call.receive(self.sent)

        others = {one.stream: one.time - 1 for other, one in self.items.items() if other != rank}
        sends = item._replace(time=item.time - 1, work=send, writes=frozenset())
        return [sends, item._replace(work=receive, needs={**item.needs, **others})]


def _together(recordings: Sequence[Recorded]) -> Recorded:
    """Join what the ranks have recorded."""
    meetings = defaultdict[Any, _Meeting](lambda: _Meeting({}, {}))
    queues = [[_of_rank(item, rank) for item in one.items] for rank, one in enumerate(recordings)]
    keys: dict[int, Any] = {}  # item -> where it meets others
    for rank, items in enumerate(queues):
        num_met = Counter[tuple[int, ...]]()
        for item in items:
            if isinstance(item.work, Collective):
                group = (*item.work.calls[0].group,)
                keys[id(item)] = group, num_met[group]
                num_met[group] += 1
                meetings[keys[id(item)]].items[rank] = item
    joined = [
        one
        for rank, items in enumerate(queues)
        for item in items
        for one in (meetings[keys[id(item)]].items_of(rank) if id(item) in keys else [item])
    ]
    values = {name: [one.values[name][0] for one in recordings] for name in recordings[0].values}
    return Recorded([run for one in recordings for run in one.runs], values, joined)


def _of_rank(item: Item, rank: int) -> Item:
    """Let an item belong to a rank, with a moment before each of its times."""

    def named(stream: str) -> str:
        return stream if stream == ALLOCATOR else f"{stream} of rank {rank}"

    def numbered(shadows: frozenset[int]) -> frozenset[int]:
        return frozenset(number + rank * _MOST_SHADOWS for number in shadows)

    needs = {named(stream): 2 * time for stream, time in item.needs.items()}
    reads, writes = numbered(item.reads), numbered(item.writes)
    return Item(named(item.stream), 2 * item.time, needs, item.name, item.work, reads, writes)
