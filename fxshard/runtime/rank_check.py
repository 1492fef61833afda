"""Before a compiled graph runs, the ranks compare its collectives, so that a difference is an error, not a hang.

[Note: agreement]
Ranks that launch different collectives hang, or reduce one gradient into another. A rank numbers its runs of compiled
graphs, separately for each set of ranks that collectives join (a `RankGroup`): what is the n-th run on one of them must
be the n-th on all. That number is finer than the ordinal of the root's call; it also orders several models, several
graphs of a call, forwards without a backward, and recomputation. Before each run a rank writes a digest of the run's
collectives (op, group, dtype, numel) under the run's number into the store of the default process group: one message,
no answer.

Only where a run is news does a rank read what the others wrote, and wait until all have come as far: at the first run
of a compiled graph, and where these collectives never followed those of the run before (an evaluation on one rank).
Everybody writes before it waits here or in a collective, so this wait ends where that of the first collective would.

- What differs without harm is not in the digest: batch sizes, recompilations, cache hits, forward against inference.
- A graph break on one rank only is a difference: a graph is compared before it is known which ones follow.
- A failed compilation takes a number too, with its message, so that the others need not wait for it.
- A rank that turns off a known path raises alone, while the others stand in a collective already. When that fails (the
  rank has ended, or the group's timeout has passed), what is in the store explains it: `RankGroup.require_agreement`.
- The store forgets nothing, so the numbers share `RING` keys per rank. No rank is that many runs ahead of another:
  they wait for each other's data, and an accelerator's queue of launches is shorter.
- A new default group may come with an old store: a `RankGroup` begins at 1 in a namespace of its own.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch import Tensor

from fxshard import torch_private
from fxshard.errors import ConfigError, FxshardError, RankMismatchError
from fxshard.ir.launches import Launch
from fxshard.runtime import profiler_ranges
from fxshard.runtime.raw import as_bytes


def checksum(tensors: Iterable[Tensor]) -> int:
    """CRC32 over the bytes of all tensors, in order."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(as_bytes(tensor.cpu()).numpy(), crc)  # type: ignore[arg-type] # a numpy array is a buffer
    return crc


def gather_texts(
    topic: str,
    text: str,
    group: dist.ProcessGroup,
    timeout: timedelta = timedelta(minutes=5),
    remedy: str = "All ranks must make the first call of the compiled model.",
) -> list[str]:
    """Every rank's text, in group order, through the store of the default process group.

    Where no other process can reach the store, the other ranks are emulated and say the same.

    Args:
        topic: what is compared; the n-th exchange of a rank on a topic meets the n-th of the others.
        text: this rank's.
        group: the ranks that compare.
        timeout: how long to wait for the other ranks.
        remedy: what the error says to do.

    Raises:
        ConfigError: some ranks never came; they are named.
    """
    store, rank, ranks = torch_private.default_store(), dist.get_rank(), dist.get_process_group_ranks(group)
    if is_in_process(store):
        return [text] * len(ranks)
    place = f"fxshard/{topic}/{group.group_name}"
    ordinal = store.add(f"{place}/ordinal/{rank}", 1)
    keys = {r: f"{place}/{ordinal}/{r}" for r in ranks}
    store.set(keys[rank], text)
    try:
        store.wait(list(keys.values()), timeout)
    except RuntimeError as error:
        absent = [str(r) for r, key in keys.items() if not store.check([key])]
        raise ConfigError(f"{topic}: rank {rank} waited {timeout} for rank {', '.join(absent)}. {remedy}") from error
    return [store.get(key).decode() for key in keys.values()]


RING = 512
"""Runs per rank that the store keeps."""

FAILED = "failed"
"""Stands for the kind of a graph that could not be compiled."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long to wait for other ranks at the store, in seconds.

    Attributes:
        warn: when to say first who is late; said again each time the wait has doubled.
        limit: when to give up, `None` for ten times the process group's timeout, but at least an hour: compilation may
            take longer than any collective.
    """

    warn: float = 30.0
    limit: float | None = None

    def limit_for(self, store: dist.Store) -> float:
        """When to give up waiting at `store`, which has the timeout of the default process group."""
        timeout: timedelta = store.timeout  # type: ignore[attr-defined] # missing in torch's stubs
        return max(3600.0, 10 * timeout.total_seconds()) if self.limit is None else self.limit


class CollectiveSequence(NamedTuple):
    """What a run does.

    Attributes:
        kind: "forward", "inference" or "backward"; outside of graphs one word for what is done.
        digest: of what must be the same on all ranks.
        text: the collectives, one per line, with what need not be the same after a "#".
        key: where the text stands in the store.
    """

    kind: str
    digest: str
    text: str
    key: str

    @classmethod
    def of(cls, kind: str, launches: Iterable[Launch]) -> CollectiveSequence:
        """The launches of a graph that go to one rank group."""
        launches = list(launches)
        digest = _hash("\n".join(launch.text for launch in launches))
        text = "\n".join(f"{launch.text}  # {launch.name}" for launch in launches)
        return cls(kind, digest, text, _hash(text))

    @classmethod
    def failure(cls, message: str) -> CollectiveSequence:
        """In place of a graph that could not be compiled."""
        return cls(FAILED, _hash(message), message, _hash(message))


class RunEntry(NamedTuple):
    """What a rank writes before a run: its number, and a `CollectiveSequence` without the text."""

    run: int
    kind: str
    digest: str
    key: str

    @classmethod
    def parse(cls, value: bytes) -> RunEntry:
        """From the store."""
        run, kind, digest, key = value.decode().split()
        return cls(int(run), kind, digest, key)


class RankGroup:
    """The ranks of one or more process groups, and how far this one has come among them; see [Note: agreement]."""

    def __init__(self, ranks: Sequence[int], store: dist.Store) -> None:
        """Begin at run 1, together with the same call on the other ranks."""
        self.rank = dist.get_rank()
        self.others = [rank for rank in ranks if rank != self.rank]
        place = f"fxshard/runs/{_hash(repr(tuple(ranks)))}"
        self._place = f"{place}/{store.add(f'{place}/lives/{self.rank}', 1)}"
        self._run = 0
        self._now = CollectiveSequence("", "", "", "")
        self._written: set[str] = set()
        self._agreed: set[tuple[str, str]] = set()
        self._turn = ("", "")

    def begin(self, store: dist.Store, program: CollectiveSequence) -> bool:
        """Write the next run into the store of the default process group; whether it never followed the one before."""
        self._turn = (self._now.digest, program.digest)
        self._run, self._now = self._run + 1, program
        if program.key not in self._written:
            store.set(f"{self._place}/text/{program.key}", program.text)
            self._written.add(program.key)
        store.set(self._slot(self.rank), f"{self._run} {program.kind} {program.digest} {program.key}")
        return self._turn not in self._agreed

    def meet(self, store: dist.Store, timeouts: Timeouts = Timeouts()) -> None:
        """Wait until all ranks have come to this run, and compare.

        Raises:
            RankMismatchError: a rank runs something else, never comes, or the store is gone.
        """
        try:
            late = self._wait(store, timeouts)
            if not late:
                self.require_agreement(store)
        except RuntimeError as error:
            if isinstance(error, FxshardError):
                raise
            raise RankMismatchError(
                f"the store of the process group failed while rank {self.rank} waited for the others before "
                f"{self._where()}: {error}. Another rank has probably ended; look at its output."
            ) from error
        if late:
            raise RankMismatchError(
                f"rank {', '.join(map(str, late))} never came to {self._where()}, for which rank {self.rank} waited "
                f"{timeouts.limit_for(store):.0f} s. Every rank must make the same calls of the compiled model."
            )
        self._agreed.add(self._turn)

    def require_agreement(self, store: dist.Store) -> None:
        """Compare this run with the ranks that have come as far.

        Raises:
            RankMismatchError: one of them runs something else.
        """
        for rank in self.others:
            for theirs in self._come(store, [rank]).values():
                if (theirs.run, theirs.digest) != (self._run, self._now.digest):
                    self._refuse(store, rank, theirs)

    def _wait(self, store: dist.Store, timeouts: Timeouts) -> list[int]:
        """The ranks that have not come when the time is up."""
        late, began, warn = self.others, time.monotonic(), timeouts.warn
        while late := sorted(set(late) - self._come(store, late).keys()):
            waited = time.monotonic() - began
            if waited > timeouts.limit_for(store):
                return [rank for rank in late if not self._come(store, [rank])]
            if waited > warn:
                absent = ", ".join(str(rank) for rank in late if not self._come(store, [rank]))
                _log.warning(
                    "fxshard: rank %d has waited %.0f s for rank %s (still compiling?) before %s.",
                    self.rank,
                    waited,
                    absent,
                    self._where(),
                )
                warn *= 2
            time.sleep(min(1.0, max(0.001, waited / 10)))
        return []

    def _come(self, store: dist.Store, ranks: Sequence[int]) -> dict[int, RunEntry]:
        """What those of `ranks` wrote who have come to this run; nothing before all have filled the slot once."""
        keys = [self._slot(rank) for rank in ranks]
        if not store.check(keys):
            return {}
        entries = zip(ranks, map(RunEntry.parse, store.multi_get(keys)), strict=True)
        return {rank: entry for rank, entry in entries if entry.run >= self._run}

    def _slot(self, rank: int) -> str:
        return f"{self._place}/{rank}/{self._run % RING}"

    def _where(self) -> str:
        return f"run {self._run} of a compiled graph ({self._now.kind})"

    def _refuse(self, store: dist.Store, rank: int, theirs: RunEntry) -> NoReturn:
        text = store.get(f"{self._place}/text/{theirs.key}").decode()
        if theirs.kind == FAILED:
            raise RankMismatchError(
                f"rank {rank} could not compile what is {self._where()} on rank {self.rank}: {text}"
            )
        if theirs.run != self._run:
            raise RankMismatchError(
                f"rank {rank} is at run {theirs.run} of its compiled graphs, but rank {self.rank} has only come to "
                f"{self._where()}. Every rank must make the same calls of the compiled model."
            )
        pairs = itertools.zip_longest(self._now.text.splitlines(), text.splitlines(), fillvalue="nothing more")
        at, (ours, other) = next((i, pair) for i, pair in enumerate(pairs, 1) if _agreed(pair[0]) != _agreed(pair[1]))
        sides = sorted([(self.rank, self._now.kind, ours), (rank, theirs.kind, other)])
        lines = "\n".join(f"    rank {r} ({kind}): {launch}" for r, kind, launch in sides)
        raise RankMismatchError(
            f"the ranks launch different collectives. In run {self._run} of a compiled graph, collective {at} is the "
            f"first that differs:\n{lines}\nBuild, shard and compile the same model with the same options on every "
            "rank, and make the same calls of it in the same order."
        )


def _agreed(line: str) -> str:
    return line.partition("  #")[0]


def _hash(text: str) -> str:
    """Short, and the same on every rank."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _rank_groups() -> weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], RankGroup]]:
    """The rank groups of each default process group that lives."""
    return weakref.WeakKeyDictionary()


def _rank_group_of(group_name: str) -> RankGroup | None:
    """Who takes part in the collectives of a group; `None` if that is this process alone."""
    world = dist.group.WORLD
    if world is None or is_in_process(torch_private.default_store()):
        return None
    group = torch_private.process_group_of(group_name)
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return None
    rank_groups = _rank_groups().setdefault(world, {})
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks not in rank_groups:
        rank_groups[ranks] = RankGroup(ranks, torch_private.default_store())
    return rank_groups[ranks]


def is_in_process(store: dist.Store) -> bool:
    """Whether no other process can reach the store: the other ranks are emulated."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.HashStore)


def report_failure(group_names: Iterable[str], message: str) -> None:
    """Tell the ranks of these groups that this rank could not compile a graph of theirs."""
    for rank_group in {
        id(rank_group): rank_group for name in sorted(group_names) if (rank_group := _rank_group_of(name)) is not None
    }.values():
        rank_group.begin(torch_private.default_store(), CollectiveSequence.failure(message))


def guard(run: Callable[..., Any], kind: str, launches: Sequence[Launch]) -> Callable[..., Any]:
    """`run`, preceded by the ranks' agreement on what it launches.

    Args:
        run: a compiled graph that takes its inputs in one list, which it empties.
        kind: as in `CollectiveSequence`.
        launches: its collectives, in order.

    Returns:
        What takes the inputs, and after them the names of the units of this run where they are not those of
        `launches`: key in the graph -> name.
    """
    return _Guarded(run, kind, launches)


class _Guarded:
    """A compiled graph with its collectives, which are found out once per default process group and set of units."""

    def __init__(self, run: Callable[..., Any], kind: str, launches: Sequence[Launch]) -> None:
        self._run, self._kind, self._launches = run, kind, launches
        self._boxed_call = True  # AOTAutograd asks for it, and looks for it in the instance
        self._world: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._parts: dict[tuple[str, ...], list[tuple[RankGroup, CollectiveSequence]]] = {}
        self._ran = False

    def __call__(self, inputs: list[Any], names: Mapping[str, str] = MappingProxyType({})) -> Any:
        if not self._launches:
            return self._run(inputs)
        launches = [launch.renamed(names) for launch in self._launches] if names else self._launches
        parts = self._agree(launches)
        try:
            with profiler_ranges.of_graph(launches):
                return self._run(inputs)
        except RuntimeError as error:
            if not isinstance(error, FxshardError):
                _explain(parts, error)
            raise

    def _agree(self, launches: Sequence[Launch]) -> list[tuple[RankGroup, CollectiveSequence]]:
        world = dist.group.WORLD
        if world is None:
            return []
        if world is not self._world():
            self._parts.clear()
            self._world, self._ran = weakref.ref(world), False
        units = tuple(launch.serves for launch in launches)
        if units not in self._parts:
            self._parts[units] = self._programs(launches)
        if parts := self._parts[units]:
            store = torch_private.default_store()
            begun = [(rank_group, rank_group.begin(store, program)) for rank_group, program in parts]
            for rank_group, is_news in begun:
                if is_news or not self._ran:
                    rank_group.meet(store)
            self._ran = True
        return parts

    def _programs(self, launches: Sequence[Launch]) -> list[tuple[RankGroup, CollectiveSequence]]:
        parts: dict[RankGroup, list[Launch]] = {}
        for launch in launches:
            rank_group = _rank_group_of(launch.group)
            if rank_group is not None:
                parts.setdefault(rank_group, []).append(launch)
        return [(rank_group, CollectiveSequence.of(self._kind, mine)) for rank_group, mine in parts.items()]


def _explain(parts: Iterable[tuple[RankGroup, CollectiveSequence]], error: RuntimeError) -> None:
    """A collective has failed: raise what the store knows about it, if anything."""
    for rank_group, _ in parts:
        try:
            rank_group.require_agreement(torch_private.default_store())
        except RankMismatchError as mismatch:
            raise mismatch from error
        except (RuntimeError, ValueError) as lost:  # the store is gone as well, or the group
            _log.info("fxshard: the store cannot say why a graph failed: %s", lost)
