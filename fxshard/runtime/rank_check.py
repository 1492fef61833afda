"""Before a compiled graph runs, the ranks compare its collectives, so that a difference is an error, not a hang.

[Note: agreement]
Ranks that launch different collectives hang, or reduce one gradient into another. A rank numbers its runs (of compiled
graphs, and of what is gathered or reduced outside of them), separately for each set of ranks that collectives join (a
`RankGroup`): what is the n-th run on one of them must be the n-th on all. That number is finer than the ordinal of the
root's call; it also orders several models, several graphs of a call, forwards without a backward, and recomputation.
Before each run a rank writes a digest of the run's collectives (op, group, dtype, numel) under the run's number into
the store of the default process group: one message, no answer.

Only where a run is news does a rank read what the others wrote, and wait until all have come as far: at the first run
of a compiled graph, and where these collectives never followed those of the run before (an evaluation on one rank).
Everybody writes before it waits here or in a collective, so this wait ends where that of the first collective would.

- What differs without harm is not in the digest: batch sizes, recompilations, cache hits, forward against inference.
- A graph break on one rank only is a difference: a graph is compared before it is known which ones follow.
- Ranks that hold the same shard (a mesh of two axes) compare all of a run that all_reduces gradients, with the gathers
  and reductions over the other axis: in another order across the axes the ranks would wait for each other in a circle.
  So do all that share a unit, where backward gathers over subgroups of them.
- Where some of the ranks that share a unit share another one (experts), or have collectives of the model's own among
  themselves, these compare how theirs and those of all follow each other: then there is one order that all ranks keep.
- A failed compilation takes a number too, with its message, so that the others need not wait for it. So does a
  run that was refused, in the groups that it was not compared in: replicas whose own shards agree would wait for it.
- A rank that turns off a known path raises alone, while the others stand in a collective already. When that fails (the
  rank has ended, or the group's timeout has passed), what is in the store explains it: `RankGroup.compare`.
- The store forgets nothing, so the numbers share `RING` keys per rank. No rank is that many runs ahead of another:
  they wait for each other's data, and an accelerator's queue of launches is shorter.
- A new default group may come with an old store: a `RankGroup` begins at 1 in a namespace of its own.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, cast

import torch.distributed as dist

from fxshard import torch_private
from fxshard.errors import FxshardError, RankMismatchError
from fxshard.ir.launches import Launch
from fxshard.ir.plan import BY, is_in_subgroup
from fxshard.runtime.rank_values import first_difference, is_in_process

RING = 512
"""Runs per rank that the store keeps."""

GRAPHS = ("forward", "backward", "inference")
"""The kinds of compiled graphs that launch collectives."""

FAILED, REFUSED = "failed", "refused"
"""Stand for the kind of a graph that could not be compiled, and of what follows a run that was refused."""

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
        kind: of the graph, one of `GRAPHS`; outside of graphs one word for what is done.
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
    def failure(cls, message: str, kind: str = FAILED) -> CollectiveSequence:
        """In place of a run that does not come: `FAILED` or `REFUSED`."""
        return cls(kind, _hash(message), message, _hash(message))


class RunEntry(NamedTuple):
    """What a rank writes before a run: its number, and a `CollectiveSequence` without the text."""

    run: int
    kind: str
    digest: str
    key: str

    @classmethod
    def parse(cls, value: bytes) -> RunEntry:
        """Read what `RankGroup.begin` has written."""
        run, kind, digest, key = value.decode().split()
        return cls(int(run), kind, digest, key)


class RankGroup:
    """The ranks of one or more process groups, and how far this one has come among them; see [Note: agreement]."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Begin at run 1, together with the same call on the other ranks."""
        self.rank = dist.get_rank()
        self.ranks = frozenset(ranks)
        self.others = [rank for rank in ranks if rank != self.rank]
        place = f"fxshard/runs/{_hash(repr(tuple(ranks)))}"
        self._place = f"{place}/{self._store.add(f'{place}/lives/{self.rank}', 1)}"
        self._run = 0
        self._now = CollectiveSequence("", "", "", "")
        self._written: set[str] = set()
        self._agreed: set[tuple[str, str]] = set()
        self._turn = ("", "")

    @property
    def _store(self) -> dist.Store:
        """Of the default process group, asked for anew: whoever holds the last reference to it keeps a server alive."""
        return torch_private.default_store()

    def begin(self, sequence: CollectiveSequence) -> bool:
        """Write the next run into the store; whether it never followed the one before."""
        store = self._store
        self._turn = (self._now.digest, sequence.digest)
        self._run, self._now = self._run + 1, sequence
        if sequence.key not in self._written:
            store.set(f"{self._place}/text/{sequence.key}", sequence.text)
            self._written.add(sequence.key)
        store.set(self._slot(self.rank), f"{self._run} {sequence.kind} {sequence.digest} {sequence.key}")
        return self._turn not in self._agreed

    def wait_and_compare(self, timeouts: Timeouts = Timeouts()) -> None:
        """Wait until all ranks have come to this run, and compare.

        Raises:
            RankMismatchError: a rank runs something else, never comes, or the store is gone.
        """
        try:
            self._wait(timeouts)
            self.compare()
        except FxshardError:
            raise
        except RuntimeError as error:
            raise RankMismatchError(
                f"the store of the process group failed while rank {self.rank} waited for the others before "
                f"{self._where()}: {error}. Another rank has probably ended; look at its output."
            ) from error
        self._agreed.add(self._turn)

    def compare(self) -> None:
        """Compare this run with the ranks that have come as far.

        Raises:
            RankMismatchError: one of them runs something else.
        """
        for rank in self.others:
            for theirs in self._arrived([rank]).values():
                if (theirs.run, theirs.digest) != (self._run, self._now.digest):
                    raise RankMismatchError(self._difference(rank, theirs))

    def _wait(self, timeouts: Timeouts) -> None:
        late, began, warn, limit = self.others, time.monotonic(), timeouts.warn, timeouts.limit_for(self._store)
        while late := sorted(set(late) - self._arrived(late).keys()):
            waited = time.monotonic() - began
            if waited > min(warn, limit):
                # Nothing is said of a rank before all have filled the slot once: ask for each by itself.
                absent = ", ".join(str(rank) for rank in late if not self._arrived([rank]))
                if absent and waited > limit:
                    raise RankMismatchError(
                        f"rank {absent} never came to {self._where()}, for which rank {self.rank} waited {limit:.0f} "
                        "s. Every rank must make the same calls of the compiled model."
                    )
                _log.warning(
                    "fxshard: rank %d has waited %.0f s for rank %s (still compiling?) before %s.",
                    self.rank,
                    waited,
                    absent,
                    self._where(),
                )
                warn *= 2
            time.sleep(min(1.0, max(0.001, waited / 10)))

    def _arrived(self, ranks: Sequence[int]) -> dict[int, RunEntry]:
        """What those of `ranks` wrote who have come to this run; nothing before all have filled the slot once."""
        keys = [self._slot(rank) for rank in ranks]
        if not self._store.check(keys):
            return {}
        entries = zip(ranks, map(RunEntry.parse, self._store.multi_get(keys)), strict=True)
        return {rank: entry for rank, entry in entries if entry.run >= self._run}

    def _slot(self, rank: int) -> str:
        return f"{self._place}/{rank}/{self._run % RING}"

    def _where(self) -> str:
        return _named(self._run, self._now.kind)

    def _difference(self, rank: int, theirs: RunEntry) -> str:
        """What a rank does otherwise than this one, as a message."""
        text = self._store.get(f"{self._place}/text/{theirs.key}").decode()
        if theirs.kind == FAILED:
            return f"rank {rank} could not compile what is {self._where()} on rank {self.rank}: {text}"
        if theirs.kind == REFUSED:
            return f"rank {rank} was refused before it came to what is {self._where()} on rank {self.rank}: {text}"
        if theirs.run != self._run:
            return (
                f"rank {rank} is at {_named(theirs.run, theirs.kind)}, but rank {self.rank} has only come to "
                f"{self._where()}. Every rank must make the same calls of the compiled model."
            )
        found = first_difference(self._now.text.splitlines(), text.splitlines(), "nothing more", _agreed)
        at, ours, other = cast("tuple[int, str, str]", found)  # for the digests differ
        sides = sorted([(self.rank, self._now.kind, ours), (rank, theirs.kind, other)])
        lines = "\n".join(f"    rank {r} ({kind}): {launch}" for r, kind, launch in sides)
        return (
            f"the ranks launch different collectives. In run {self._run}, collective {at} is the first that differs:\n"
            f"{lines}\nBuild, shard and compile the same model with the same options on every rank, and make the same "
            "calls of it in the same order."
        )


def _named(run: int, kind: str) -> str:
    """A run, in words."""
    return f"run {run} ({kind} graph)" if kind in GRAPHS else f"run {run} ({kind}, outside of graphs)"


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
    group = torch_private.process_group_of(group_name.partition(BY)[0])
    if group.size() == 1 or "fake" in dist.get_backend(group):  # of a new group it is a list of devices
        return None
    rank_groups = _rank_groups().setdefault(world, {})
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks not in rank_groups:
        rank_groups[ranks] = RankGroup(ranks)
    return rank_groups[ranks]


def report_failure(group_names: Iterable[str], message: str, kind: str = FAILED, told: tuple[object, ...] = ()) -> None:
    """Tell the ranks of these groups that this rank could not compile a graph of theirs, or was refused before it."""
    found = [_rank_group_of(name) for name in sorted(group_names)]
    for rank_group in dict.fromkeys(group for group in found if group is not None and group not in told):
        rank_group.begin(CollectiveSequence.failure(message, kind))


@contextmanager
def telling_others(groups: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Around a run of units with these groups, asked for only where it is refused: ranks that come later hear of it."""
    try:
        yield
    except RankMismatchError as error:
        with suppress(RuntimeError):  # the store may be what is lost
            report_failure(groups(), str(error), REFUSED, error.told)
        raise


class Agreement:
    """The ranks' agreement on what a graph launches, or one collective outside of graphs, before each run of it."""

    def __init__(self, kind: str) -> None:
        """`kind`: as in `CollectiveSequence`."""
        self._kind = kind
        self._world: Callable[[], dist.ProcessGroup | None] = lambda: None
        # By the units of a run; found once per default process group.
        self._sequences: dict[tuple[str, ...], dict[RankGroup, CollectiveSequence]] = {}
        self._ran = False

    @contextmanager
    def before(self, launches: Sequence[Launch]) -> Iterator[None]:
        """Around one run that makes these launches.

        Raises:
            RankMismatchError: another rank launches something else.
        """
        sequences = self._sequences_of(launches)
        try:
            self._agree(sequences)
            with _explained(sequences):
                yield
        except RankMismatchError as error:
            error.told += tuple(sequences)
            raise

    def _sequences_of(self, launches: Sequence[Launch]) -> Mapping[RankGroup, CollectiveSequence]:
        """The rank groups of a run, and what it launches on each."""
        world = dist.group.WORLD
        if world is None:
            return {}
        if world is not self._world():
            self._sequences.clear()
            self._world, self._ran = weakref.ref(world), False
        units = tuple(launch.serves for launch in launches)
        if units not in self._sequences:
            self._sequences[units] = self._by_rank_group(launches)
        return self._sequences[units]

    def _agree(self, sequences: Mapping[RankGroup, CollectiveSequence]) -> None:
        begun = [(rank_group, rank_group.begin(sequence)) for rank_group, sequence in sequences.items()]
        for rank_group, is_news in begun:
            if is_news or not self._ran:
                rank_group.wait_and_compare()
        self._ran = self._ran or bool(begun)

    def _by_rank_group(self, launches: Sequence[Launch]) -> dict[RankGroup, CollectiveSequence]:
        on = {launch.group: _rank_group_of(launch.group) for launch in launches}
        found: dict[RankGroup, list[Launch]] = {}
        for launch in launches:
            if (rank_group := on[launch.group]) is not None:
                found.setdefault(rank_group, []).append(launch)
        for rank_group, mine in found.items():
            averages = any(launch.kind == "all_reduce" and launch.serves for launch in mine)
            wider = {name for name, other in on.items() if other is not None and rank_group.ranks < other.ranks}
            if averages or any(is_in_subgroup(launch.serves) for launch in launches if launch not in mine):
                found[rank_group] = [each.on_any_group for each in launches if each.serves or each in mine]
            elif wider:
                found[rank_group] = list(_with_those_of_all(launches, mine, wider))
        return {rank_group: CollectiveSequence.of(self._kind, mine) for rank_group, mine in found.items()}


def _with_those_of_all(launches: Sequence[Launch], mine: Sequence[Launch], wider: Collection[str]) -> Iterator[Launch]:
    """Yield the launches of a rank group, and those for units over groups with more ranks, in their order.

    If it has launches for units itself, the model's own as well, without what may differ between its ranks.
    """
    shares = any(launch.serves for launch in mine)
    for launch in launches:
        if launch in mine or (launch.serves and launch.group in wider):
            yield launch
        elif shares and not launch.serves:
            yield launch._replace(text=f"{launch.kind} of the model's own")


@contextmanager
def _explained(rank_groups: Iterable[RankGroup]) -> Iterator[None]:
    """Around a run: where a collective fails, raise what the store knows about it, if anything."""
    try:
        yield
    except FxshardError:
        raise
    except RuntimeError as error:
        _explain(rank_groups, error)
        raise


def _explain(rank_groups: Iterable[RankGroup], error: RuntimeError) -> None:
    for rank_group in rank_groups:
        try:
            rank_group.compare()
        except RankMismatchError as mismatch:
            raise mismatch from error
        except (RuntimeError, ValueError) as lost:  # the store is gone as well, or the group
            _log.info("fxshard: the store cannot say why a graph failed: %s", lost)
