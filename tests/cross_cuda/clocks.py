"""Streams without a GPU: who has waited for whom, told by vector clocks, and which accesses race.

[Note: races]
Each stream has a clock: for every stream, up to which of its ops all has been waited for. An op on a stream may touch
what another stream has written, or write what another one has touched, only if the clock says that it has waited for
it. Memory belongs to the stream on which it was allocated. When it is freed the allocator hands it out to the next who
allocates there, so all that touched it must have been waited for by then, unless it was recorded with a stream: the
allocator itself then waits for what that stream had been given when the memory was freed.

The host is one more stream, for what touches its memory alone. What it gives to the device comes after all that it has
done; it has waited for the device where it synchronised with an event.

Memory is told apart by storage, not by byte. The device runs streams as late or as early as waits allow, so what is
found here need not go wrong in any one run; what goes wrong in a run is found.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Clock = dict[str, int]
Work = Callable[[], None]
"""Computes an op, where somebody computes."""


class Access(NamedTuple):
    """One op that touched a storage."""

    stream: str
    time: int  # by the stream's own clock
    op: str

    def is_before(self, clock: Clock) -> bool:
        """Return whether who has this clock has waited for it."""
        return clock.get(self.stream, 0) >= self.time


class Seeded(NamedTuple):
    """A fault to put in, which must then be found."""

    # "fork", "join", "synchronize" (waits of a stream for another, for an event, of the host for one), "record_stream",
    # "free" (a work holds nothing), "event" (recorded one op too early), "copy" (of inputs, to a CUDA graph's memory)
    forgets: str = ""
    only: int | None = None  # the one of that number in the run; `None` for all of them
    moved: bool = False  # whether a wait comes behind the next op, in place of never


NO_FAULT = Seeded()


class MockEvent:
    """What `torch.cuda.Event` is for streams here."""

    def __init__(self, clock: Clock, streams: Streams) -> None:
        self.clock, self.streams = dict(clock), streams

    def synchronize(self) -> None:
        self.streams.host.wait("synchronize", self.clock)


class MockStream:
    """What `torch.cuda.Stream` is: an order of ops, and a clock."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name, self.clock = streams, name, {name: 1}
        self.device = torch.device("cuda", 0)
        self._last, self._late = 0, Clock()  # time of its last op; what it waits for only behind the next one

    def tick(self) -> None:
        """Tell what comes next from what was."""
        self.clock[self.name] += 1

    def wait_stream(self, other: MockStream) -> None:
        """Wait for all that another stream has been given."""
        self.wait("fork", other.clock)
        other.tick()

    def record_event(self, event: MockEvent | None = None) -> MockEvent:
        """Return an event behind all that the stream has been given."""
        early = {self.name: self._last - 1} if self.streams.forgets("event") else {}
        made = MockEvent(self.clock | early, self.streams)
        self.tick()
        return made

    def wait_event(self, event: MockEvent) -> None:
        self.wait("join", event.clock)

    def wait(self, kind: str, clock: Clock) -> None:
        """Wait for what a clock has waited for, unless that is the fault."""
        if not self.streams.forgets(kind):
            self.follow(clock)
        elif self.streams.seeded.moved:
            self._late = dict(clock)

    def end_op(self) -> None:
        self._last = self.clock[self.name]
        self.tick()
        self.follow(self._late)
        self._late = {}

    def follow(self, clock: Clock) -> None:
        """Wait for what a clock has waited for."""
        for name, time in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), time)

    def synchronize(self) -> None:
        """Refuse: the host would wait."""
        raise AssertionError(f"the host waits for stream {self.name}")


@dataclass
class _Storage:
    """What is known of a storage."""

    number: int  # another one for each
    home: str  # the stream on which it was allocated
    pool: str  # of the allocator
    write: Access | None = None
    reads: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)


@dataclass
class Streams:
    """All streams of a run, their memory, and the races among them; see [Note: races]."""

    seeded: Seeded = field(default_factory=Seeded)
    races: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count = Counter[str]()  # how often each fault could have been put in so far
        self._by_name: dict[str, MockStream] = {}
        self._storages: dict[int, _Storage] = {}
        self._freed: dict[tuple[str, str], list[Access]] = {}
        self.pool = ""  # of the allocator: a recorded CUDA graph has one of its own
        self._numbers = itertools.count()
        self.main = self.current = self.named("main")
        self.host = self.named("host")

    def named(self, name: str) -> MockStream:
        """Return the stream of that name, made when first asked for."""
        if name not in self._by_name:
            self._by_name[name] = MockStream(self, name)
        return self._by_name[name]

    def made(self, *_: Any, **__: Any) -> MockStream:
        """Make a stream, as `torch.cuda.Stream(...)` does."""
        return self.named(f"side{len(self._by_name) - 1}")  # the host is one

    @contextmanager
    def using(self, stream: MockStream) -> Iterator[None]:
        """Run on a stream, as `torch.cuda.stream(...)` does."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def forgets(self, kind: str) -> bool:
        """Whether what comes now, such as a fork, is left out."""
        self.count[kind] += 1
        return kind == self.seeded.forgets and self.seeded.only in (None, self.count[kind] - 1)

    def number_of(self, tensor: Tensor) -> int:
        """Return a number that no other storage has had."""
        return self._storage_of(tensor, "an op").number

    def allocate(self, tensors: Iterable[Tensor], op: str) -> None:
        """Note memory that an op on the current stream makes."""
        for tensor in tensors:
            self._storage_of(tensor, op)

    def run(self, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Work | None = None) -> None:
        """Run an op on the current stream."""
        stream = self.current
        self._follow_host(stream)
        access = Access(stream.name, stream.clock[stream.name], op)
        for tensor in reads:
            storage = self._storage_of(tensor, op)
            self._require_before(storage.write, stream, f"{op} on {stream.name} reads what was not waited for")
            storage.reads.append(access)
        for tensor in writes:
            storage = self._storage_of(tensor, op)
            for earlier in (storage.write, *storage.reads):
                self._require_before(earlier, stream, f"{op} on {stream.name} overwrites what is in use")
            storage.write, storage.reads = access, []
        self.given(op, reads, writes, work)
        stream.end_op()

    def _follow_host(self, stream: MockStream) -> None:
        """Have a stream begin something only behind all that the host has done and waited for."""
        if stream is not self.host:
            stream.follow(self.host.clock)
            self.host.tick()

    def given(self, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Work | None) -> None:
        """Take what the current stream is given now; whoever computes keeps it."""

    def record(self, tensor: Tensor, stream: MockStream) -> None:
        """Tell the allocator that a stream uses a tensor, as `Tensor.record_stream` does."""
        if not self.forgets("record_stream"):
            self._storage_of(tensor, "record_stream").recorded.add(stream.name)

    def _require_before(self, access: Access | None, stream: MockStream, what: str) -> None:
        if access is not None and not access.is_before(stream.clock):
            self.races.append(f"{what}: {access.op} on {access.stream}")

    def _storage_of(self, tensor: Tensor, op: str) -> _Storage:
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key not in self._storages:
            stream = self.current if tensor.is_cuda else self.host
            self._follow_host(stream)
            for access in self._freed.pop((stream.name, self.pool), []):
                self._require_before(access, stream, f"{op} on {stream.name} is given memory that is in use")
            self._storages[key] = _Storage(next(self._numbers), stream.name, self.pool)
            weakref.finalize(memory, self._free, key)
        return self._storages[key]

    def _free(self, key: int) -> None:
        storage = self._storages.pop(key)
        waited_for = [self._by_name[name].clock for name in storage.recorded]
        touched = [access for access in (storage.write, *storage.reads) if access is not None]
        in_use = [access for access in touched if not any(access.is_before(clock) for clock in waited_for)]
        self._freed.setdefault((storage.home, storage.pool), []).extend(in_use)
