"""Before a compiled graph runs, the ranks compare its collectives, so that a difference is an error, not a hang.

[Note: agreement]
Ranks that launch different collectives hang, or reduce one gradient into another. A rank numbers its runs of compiled
graphs, apart for each set of ranks that collectives join (a `Crew`): what is the n-th run on one of them must be the
n-th on all. That number is finer than the ordinal of the root's call; it also orders several models, several graphs of
a call, forwards without a backward, and recomputation. Before each run a rank writes a digest of the run's collectives
(op, group, dtype, numel) under the run's number into the store of the default process group: one message, no answer.

Only where a run is news does a rank read what the others wrote, and wait until all have come as far: at the first run
of a compiled graph, and where these collectives never followed those of the run before (an evaluation on one rank).
Everybody writes before it waits here or in a collective, so this wait ends where that of the first collective would.

- What differs without harm is not in the digest: batch sizes, recompilations, cache hits, forward against inference.
- A graph break on one rank only is a difference: a graph is compared before it is known which ones follow.
- A failed compilation takes a number too, with its message, so that the others need not wait for it.
- A rank that turns off a known path raises alone, while the others stand in a collective already. When that fails
  (the rank has ended, or the group's timeout has passed), what is in the store explains it: `Crew.require_agreement`.
- The store forgets nothing, so the numbers share `RING` keys per rank. No rank is that many runs ahead of another:
  they wait for each other's data, and an accelerator's queue of launches is shorter.
- A new default group may come with an old store: a `Crew` begins at 1 in a namespace of its own.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group

from fxshard.errors import FxshardError, RankMismatchError
from fxshard.ir.order import Launch
from fxshard.runtime import ranges

RING = 512
"""Runs per rank that the store keeps."""

FAILED = "failed"
"""Stands for the kind of a graph that could not be compiled."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Patience:
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


class Program(NamedTuple):
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
    def of(cls, kind: str, launches: Iterable[Launch]) -> Program:
        """The launches of a graph that go to one crew."""
        launches = list(launches)
        digest = _hash("\n".join(launch.text for launch in launches))
        text = "\n".join(f"{launch.text}  # {launch.name}" for launch in launches)
        return cls(kind, digest, text, _hash(text))

    @classmethod
    def failure(cls, message: str) -> Program:
        """In place of a graph that could not be compiled."""
        return cls(FAILED, _hash(message), message, _hash(message))


class Entry(NamedTuple):
    """What a rank writes before a run: its number, and a `Program` without the text."""

    run: int
    kind: str
    digest: str
    key: str

    @classmethod
    def parse(cls, value: bytes) -> Entry:
        """From the store."""
        run, kind, digest, key = value.decode().split()
        return cls(int(run), kind, digest, key)


class Crew:
    """The ranks of one or more process groups, and how far this one has come among them; see [Note: agreement]."""

    def __init__(self, ranks: Sequence[int], store: dist.Store) -> None:
        """Begin at run 1, together with the same call on the other ranks."""
        self.rank = dist.get_rank()
        self.others = [rank for rank in ranks if rank != self.rank]
        place = f"fxshard/runs/{_hash(repr(tuple(ranks)))}"
        self._place = f"{place}/{store.add(f'{place}/lives/{self.rank}', 1)}"
        self._run = 0
        self._now = Program("", "", "", "")
        self._written: set[str] = set()
        self._agreed: set[tuple[str, str]] = set()
        self._turn = ("", "")

    def begin(self, store: dist.Store, program: Program) -> bool:
        """Write the next run into the store of the default process group; whether it never followed the one before."""
        self._turn = (self._now.digest, program.digest)
        self._run, self._now = self._run + 1, program
        if program.key not in self._written:
            store.set(f"{self._place}/text/{program.key}", program.text)
            self._written.add(program.key)
        store.set(self._slot(self.rank), f"{self._run} {program.kind} {program.digest} {program.key}")
        return self._turn not in self._agreed

    def meet(self, store: dist.Store, patience: Patience = Patience()) -> None:
        """Wait until all ranks have come to this run, and compare.

        Raises:
            RankMismatchError: a rank runs something else, never comes, or the store is gone.
        """
        try:
            late = self._wait(store, patience)
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
                f"{patience.limit_for(store):.0f} s. Every rank must make the same calls of the compiled model."
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

    def _wait(self, store: dist.Store, patience: Patience) -> list[int]:
        """The ranks that have not come when patience has ended."""
        late, began, warn = self.others, time.monotonic(), patience.warn
        while late := sorted(set(late) - self._come(store, late).keys()):
            waited = time.monotonic() - began
            if waited > patience.limit_for(store):
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

    def _come(self, store: dist.Store, ranks: Sequence[int]) -> dict[int, Entry]:
        """What those of `ranks` wrote who have come to this run; nothing before all have filled the slot once."""
        keys = [self._slot(rank) for rank in ranks]
        if not store.check(keys):
            return {}
        entries = zip(ranks, map(Entry.parse, store.multi_get(keys)), strict=True)
        return {rank: entry for rank, entry in entries if entry.run >= self._run}

    def _slot(self, rank: int) -> str:
        return f"{self._place}/{rank}/{self._run % RING}"

    def _where(self) -> str:
        return f"run {self._run} of a compiled graph ({self._now.kind})"

    def _refuse(self, store: dist.Store, rank: int, theirs: Entry) -> NoReturn:
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
def _crews() -> weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Crew]]:
    """The crews of each default process group that lives."""
    return weakref.WeakKeyDictionary()


def _crew_of(group_name: str) -> Crew | None:
    """Who takes part in the collectives of a group; `None` if that is this process alone."""
    world = dist.group.WORLD
    if world is None or is_in_process(_get_default_store()):
        return None
    group: dist.ProcessGroup = _resolve_process_group(group_name)  # type: ignore[arg-type] # a NewType since 2.13
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return None
    crews = _crews().setdefault(world, {})
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks not in crews:
        crews[ranks] = Crew(ranks, _get_default_store())
    return crews[ranks]


def is_in_process(store: dist.Store) -> bool:
    """Whether no other process can reach the store: the other ranks are emulated."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.HashStore)


def report_failure(group_names: Iterable[str], message: str) -> None:
    """Tell the ranks of these groups that this rank could not compile a graph of theirs."""
    for crew in {id(crew): crew for name in sorted(group_names) if (crew := _crew_of(name)) is not None}.values():
        crew.begin(_get_default_store(), Program.failure(message))


def guard(run: Callable[..., Any], kind: str, launches: Sequence[Launch]) -> Callable[..., Any]:
    """`run`, preceded by the ranks' agreement on what it launches.

    Args:
        run: a compiled graph that takes its inputs in one list, which it empties.
        kind: as in `Program`.
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
        self._parts: dict[tuple[str, ...], list[tuple[Crew, Program]]] = {}
        self._ran = False

    def __call__(self, inputs: list[Any], names: Mapping[str, str] = MappingProxyType({})) -> Any:
        if not self._launches:
            return self._run(inputs)
        launches = [launch.renamed(names) for launch in self._launches] if names else self._launches
        parts = self._agree(launches)
        try:
            with ranges.of_graph(launches):
                return self._run(inputs)
        except RuntimeError as error:
            if not isinstance(error, FxshardError):
                _explain(parts, error)
            raise

    def _agree(self, launches: Sequence[Launch]) -> list[tuple[Crew, Program]]:
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
            store = _get_default_store()
            begun = [(crew, crew.begin(store, program)) for crew, program in parts]
            for crew, is_news in begun:
                if is_news or not self._ran:
                    crew.meet(store)
            self._ran = True
        return parts

    def _programs(self, launches: Sequence[Launch]) -> list[tuple[Crew, Program]]:
        parts: dict[Crew, list[Launch]] = {}
        for launch in launches:
            crew = _crew_of(launch.group)
            if crew is not None:
                parts.setdefault(crew, []).append(launch)
        return [(crew, Program.of(self._kind, mine)) for crew, mine in parts.items()]


def _explain(parts: Iterable[tuple[Crew, Program]], error: RuntimeError) -> None:
    """A collective has failed: raise what the store knows about it, if anything."""
    for crew, _ in parts:
        try:
            crew.require_agreement(_get_default_store())
        except RankMismatchError as mismatch:
            raise mismatch from error
        except (RuntimeError, ValueError) as lost:  # the store is gone as well, or the group
            _log.info("fxshard: the store cannot say why a graph failed: %s", lost)
