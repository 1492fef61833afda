"""The runs of the ranks that share process groups, in a store: what each is about to launch, and what it has launched.

See [Note: agreement] in `rank_check.py`.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from fxshard.errors import FxshardError, RankMismatchError
from fxshard.ir.launches import Launch
from fxshard.ranks.rendezvous import Rendezvous, first_difference, longest_wait, polls

RING = 512
"""Runs per rank that the store keeps."""

PEERS = 7
"""Other ranks that a rank looks back at: those behind it in a ring, so that the store is asked as much per rank with
any number of ranks."""

LOOK_EVERY = 64
"""Runs without a backward, after which a rank looks back."""

ARRIVAL_S = 5.0
"""How long a rank that looks back waits for an entry that another one must write: well above `TELL_AFTER_S`."""

GRAPHS = ("forward", "backward", "inference")
"""The kinds of compiled graphs that launch collectives."""

FAILED, REFUSED = "failed", "refused"
"""Stand for the kind of a graph that could not be compiled, and of what follows a run that was refused."""

_log = logging.getLogger(__name__)


class CollectiveSequence(NamedTuple):
    """What a run does."""

    kind: str  # of the graph, one of `GRAPHS`; outside of graphs one word for what is done
    digest: str  # of what must be the same on all ranks
    text: str  # the collectives, one per line, with what need not be the same after a "#"
    key: str  # where the text stands in the store
    values: str = ""  # that must be the same, too, but make no path of their own: they may change in each run

    @property
    def whole_digest(self) -> str:
        """Of all that must be the same."""
        return _hash(self.digest + self.values) if self.values else self.digest

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
    """What a rank writes before a run: a `CollectiveSequence` without the text, and what was before."""

    run: int  # its number
    kind: str  # of the run
    digest: str  # of the run, with its values
    key: str  # where the text stands in the store
    since: int  # the first run that `history` counts, the one after the last error
    history: str  # a hash of the digests of all runs from there to this one
    values: str = ""


class RankGroup:
    """The ranks of one or more process groups, and how far this one has come among them; see [Note: agreement]."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Begin at run 1, together with the same call on the other ranks."""
        self.rank = dist.get_rank()
        self.ranks = frozenset(ranks)
        ring = sorted(ranks)
        at = ring.index(self.rank)
        self.others = [rank for rank in ranks if rank != self.rank]
        self._peers = [*ring[at + 1 :], *ring[:at]][:PEERS]
        self._meeting = Rendezvous("runs", ranks, again=True)
        self._run = 0
        self._now = CollectiveSequence("", "", "", "")
        self._past: deque[tuple[RunEntry, CollectiveSequence]] = deque(maxlen=RING)
        self._since, self._history = 1, ""
        self._looked = self._at_last_look = 0
        self._written: set[str] = set()
        self._untold: deque[RunEntry] = deque()
        self._telling = threading.Lock()
        self._agreed: set[tuple[str, str]] = set()
        self._turn = ("", "")

    def begin(self, sequence: CollectiveSequence) -> bool:
        """Begin the next run, of which `tell` tells the others; whether it never followed the one before."""
        self._turn = (self._now.digest, sequence.digest)
        self._run, self._now = self._run + 1, sequence
        if sequence.key not in self._written:
            self._meeting.write(f"text/{sequence.key}", sequence.text)
            self._written.add(sequence.key)
        digest = sequence.whole_digest
        self._history = _hash(self._history + digest)
        past = self._since, self._history, sequence.values
        entry = RunEntry(self._run, sequence.kind, digest, sequence.key, *past)
        self._past.append((entry, sequence))
        self._untold.append(entry)
        if sequence.kind in (FAILED, REFUSED):
            self.tell()
            self.forget()
        return self._turn not in self._agreed

    def tell(self) -> None:
        """Write the runs that have begun into the store; any thread may."""
        with self._telling:
            untold = [self._untold.popleft() for _ in range(len(self._untold))]
            if untold:
                self._meeting.write_all({self._slot(self.rank, entry.run): entry for entry in untold})

    def forget(self) -> None:
        """Let what differed before not count after it was an error: neither in a history nor in a look back."""
        self._since, self._history = self._run + 1, ""
        self._looked = self._at_last_look = self._run

    def wait_and_compare(
        self, never: Callable[[], str] = str, *, warn: float = 30.0, limit: float | None = None
    ) -> None:
        """Wait until all ranks have come to this run, and compare; warn after `warn` seconds, 2 x `warn`, and so on."""
        try:
            self.tell()
            self._wait(never, warn, longest_wait() if limit is None else limit)
            self.compare()
        except FxshardError:
            raise
        except RuntimeError as error:
            raise RankMismatchError(
                f"the store of the process group failed while rank {self.rank} waited for the others before "
                f"{self._where()}: {error}. Another rank has probably ended; look at its output."
            ) from error
        self._agreed.add(self._turn)

    def compare(self, timeout: float = 0.0) -> None:
        """Compare this run with the ranks that come as far within so many seconds."""
        self.tell()
        for _ in polls(timeout):
            if self._arrived(self.others, self._run):
                break
        if found := self._differing(self.others):
            self.forget()
            raise RankMismatchError(self._difference(*found, self._run, self._now))

    def known_difference(self) -> str:
        """What one of some ranks does otherwise in this run, or did before: it may be waited for here; or nothing."""
        self.tell()
        run, now = self._run, self._now
        found, before = self._differing(self._peers), self._differing_before()
        if run != self._run or now is not self._now:  # asked by another thread than that which runs
            return ""
        if found:
            return self._difference(*found, run, now)
        return self._past_difference(*before, before[1].run) if before else ""

    def whereabouts(self) -> tuple[list[int], list[int]]:
        """Of some ranks, those that have not come to this run, and those that are in it."""
        come = self._arrived_each(self._peers)
        absent = [rank for rank in self._peers if rank not in come]
        return absent, [rank for rank, entry in come.items() if entry.run == self._run]

    @property
    def run(self) -> str:
        """What all its ranks call this run."""
        return f"{self._meeting.place} {self._run}"

    def words(self) -> str:
        """What this rank does in this run."""
        return f"{self._where()}: {_agreed(self._now.text.partition(chr(10))[0])}"

    def _differing(self, ranks: Sequence[int]) -> tuple[int, RunEntry] | None:
        """The first of `ranks` that has come to this run with something else, and what."""
        for rank, theirs in self._arrived_each(ranks).items():
            if (theirs.run, theirs.digest) != (self._run, self._now.whole_digest):
                return rank, theirs
        return None

    def _differing_before(self) -> tuple[int, RunEntry] | None:
        """The first of some ranks that differs in the last of these runs that it has come to, or before, and how."""
        for rank in self._peers:
            for ours, _ in reversed(list(self._past)):
                if theirs := self._arrived([rank], ours.run).get(rank):
                    if (theirs.run, theirs.since) == (ours.run, ours.since) and theirs.history != ours.history:
                        return rank, theirs
                    break
        return None

    def look_back(self, *, is_over: bool) -> None:
        """Compare the runs that are past with some of the ranks that have come as far; see [Note: agreement].

        `is_over`: this run is over, so that all ranks have begun it; else up to the run of the last look.
        """
        run = self._run if is_over else self._at_last_look
        self._at_last_look = self._run
        try:
            self.tell()
            if not self._looked < run or not self._run - run < len(self._past):
                return
            self._compare_past(run, ARRIVAL_S if is_over else 0.0)
        except FxshardError:
            raise
        except RuntimeError as lost:
            _log.info("fxshard: the store does not tell what other ranks ran (its rank may have ended): %s", lost)

    def _compare_past(self, run: int, timeout: float) -> None:
        for _ in polls(timeout):
            if len(found := self._arrived(self._peers, run)) == len(self._peers):
                break
        ours, _ = self._past[run - self._run - 1]
        for rank, theirs in found.items():
            is_same = theirs.history == ours.history if theirs.since == ours.since else theirs.digest == ours.digest
            if theirs.run != run or not is_same:
                self.forget()
                raise RankMismatchError(self._past_difference(rank, theirs, run))
        if len(found) == len(self._peers):
            self._looked = run

    @property
    def is_look_due(self) -> bool:
        """Whether so many runs are past that this rank should look back, though no backward has ended."""
        return self._run - self._at_last_look >= LOOK_EVERY

    def _wait(self, never: Callable[[], str], warn: float, limit: float) -> None:
        late = self.others
        for waited in polls(limit):
            late = sorted(set(late) - self._arrived(late, self._run).keys())
            if not late:
                return
            if why := never():
                raise RankMismatchError(why)
            if waited > warn:
                text = "fxshard: rank %d has waited %.0f s for rank %s (still compiling?) before %s."
                _log.warning(text, self.rank, waited, self._absent(late), self._where())
                warn *= 2
        if absent := self._absent(late):
            raise RankMismatchError(
                f"rank {absent} never came to {self._where()}, for which rank {self.rank} waited {limit:.0f} s. Every "
                "rank must make the same calls of the compiled model."
            )

    def _absent(self, late: Iterable[int]) -> str:
        come = self._arrived_each(late)
        return ", ".join(str(rank) for rank in late if rank not in come)

    def _arrived_each(self, ranks: Iterable[int]) -> dict[int, RunEntry]:
        """What those of `ranks` wrote who have come to this run; each is read by itself."""
        return {rank: entry for each in ranks for rank, entry in self._arrived([each], self._run).items()}

    def _arrived(self, ranks: Sequence[int], run: int) -> dict[int, RunEntry]:
        """What those of `ranks` wrote who have come to a run; nothing before all have filled the slot once."""
        read = self._meeting.read(*(self._slot(rank, run) for rank in ranks), are_written=run > RING)
        entries = zip(ranks, (RunEntry(*entry) for entry in read), strict=False)
        return {rank: entry for rank, entry in entries if entry.run >= run}

    def _slot(self, rank: int, run: int) -> str:
        return f"{rank}/{run % RING}"

    def _where(self) -> str:
        return _named(self._run, self._now.kind)

    def _past_difference(self, rank: int, theirs: RunEntry, run: int) -> str:
        """What a rank did otherwise than this one, in the first run up to `run` that still stands in the store."""
        first = max(theirs.since, self._past[run - self._run - 1][0].since)
        known = {entry.run: mine for entry, mine in self._past if first <= entry.run <= run} or {run: self._now}
        for read in self._meeting.read(*(self._slot(rank, each) for each in known)):
            entry = RunEntry(*read)
            if entry.run in known and entry.digest != known[entry.run].whole_digest:
                theirs, run = entry, entry.run
                break
        else:
            if theirs.run == run and theirs.digest == known[run].whole_digest:
                first = min(known)
                return f"ranks {rank} and {self.rank} launched different collectives before run {first}. {_REMEDY}"
        return (
            f"{self._difference(rank, theirs, run, known[run])}\nThis was found after the run: outputs and gradients "
            "since then are wrong on all ranks, so drop them before the optimizer steps."
        )

    def _difference(self, rank: int, theirs: RunEntry, run: int, ours: CollectiveSequence) -> str:
        """What a rank does otherwise than this one in a run, as a message."""
        (text,), where = self._meeting.read(f"text/{theirs.key}"), _named(run, ours.kind)
        if theirs.kind == FAILED:
            return f"rank {rank} could not compile what is {where} on rank {self.rank}: {text}"
        if theirs.kind == REFUSED:
            return f"rank {rank} was refused before it came to what is {where} on rank {self.rank}: {text}"
        if theirs.run != run:
            return (
                f"rank {rank} is at {_named(theirs.run, theirs.kind)}, but rank {self.rank} has only come to "
                f"{where}. Every rank must make the same calls of the compiled model."
            )
        found = first_difference(ours.text.splitlines(), text.splitlines(), "nothing more", _agreed)
        if found is None:
            sides = sorted([(self.rank, ours.kind, ours.values), (rank, theirs.kind, theirs.values)])
            lines = "\n".join(f"    rank {r} ({kind}): {values}" for r, kind, values in sides)
            return f"the ranks have different values in run {run}. Give all ranks the same:\n{lines}"
        at, mine, other = found
        sides = sorted([(self.rank, ours.kind, mine), (rank, theirs.kind, other)])
        lines = "\n".join(f"    rank {r} ({kind}): {launch}" for r, kind, launch in sides)
        return (
            f"the ranks launch different collectives. In run {run}, collective {at} is the first that differs:\n"
            f"{lines}\nBuild, shard and compile the same model with the same options on every rank, and make the same "
            f"calls of it in the same order. {_REMEDY}"
        )


_REMEDY = (
    "Where a rank's data decides which modules run, call all of them on every rank, in one order: give those without "
    "input a dummy (an image of zeros, or zero rows: x[:0]) and add 0 times their output's sum to the loss."
)


def _named(run: int, kind: str) -> str:
    return f"run {run} ({kind} graph)" if kind in GRAPHS else f"run {run} ({kind}, outside of graphs)"


def _agreed(line: str) -> str:
    return line.partition("  #")[0]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
