"""Runs that wait for each other because ranks went different ways: found while they wait, and ended.

[Note: stalled runs]
On a path that is known no rank reads what the others write before it launches ([Note: agreement] in `rank_check.py`).
Where ranks then wait in collectives of different process groups, none of them fails, and all wait until the timeout of
the groups, half an hour. So a thread looks at each run that has not ended after `AFTER_S`, and tells the others of it:

- Another rank has written something else under the same number. Then the collective will never come.
- A rank that has not come to this run is itself in one that waits for a rank, and so on, back to this rank. Then none
  of them will come. (Who shares experts with a rank that gets no rows waits for it there, while it waits for all in the
  next block.) A rank that is in the same run counts, too, if it waits for one that has not come. A circle is believed
  when it is seen `SIGHTINGS` times without change.
- The ranks for which this one waits lead to one that got such an error, or whose run has failed by itself (it ran out
  of memory), and has begun nothing since.

On `fxshard_gloo` the thread shuts the connections of the run's groups down, the wait fails, and what was found becomes
the error. Other backends have no such connections of ours: there the thread logs what it found. A rank that is slow is
in no circle, and is waited for.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from fxshard.errors import FxshardError, RankMismatchError
from fxshard.ir.launches import Launch
from fxshard.ir.plan import BY
from fxshard.ranks.rendezvous import Rendezvous
from fxshard.runtime import gloo
from fxshard.runtime.rank_group import RankGroup

TELL_AFTER_S = 1.0
"""How long a rank may keep to itself that a run has begun."""

AFTER_S = 3.0
"""When a run is looked at first, and how often from then on."""

SIGHTINGS = 4

ENDED = -1

_PLACES = Rendezvous("stalled")

_log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a rank is stalled."""

    number: int = 0  # tells it from others of the rank; 0 for nowhere, `ENDED` where it was ended
    absent: Sequence[int] = ()  # ranks that have not come to its run
    present: Sequence[int] = ()  # ranks that have come to it, and may have left it since
    runs: Sequence[str] = ()  # what its run is called among the ranks that agree on it
    words: str = ""  # what it does, or why it was ended


@dataclass(eq=False)
class StalledRun:
    """A run that may be stalled."""

    rank_groups: Collection[RankGroup]  # that agree on it
    launches: Sequence[Launch]  # what it launches
    next_look: float  # when the thread looks at it again
    why: str = ""  # why it will never end, as a message; empty for what is not known
    number: int = 0  # tells it from others of this rank, once others were told of it
    # the circle that was seen at the last look: ranks, and the numbers of their runs.
    suspect: list[tuple[int, int]] = field(default_factory=list)
    sightings: int = 0  # how often it was seen

    def look(self) -> str:
        """Tell the others of this run, and return why it will never end; empty if it may."""
        for rank_group in self.rank_groups:
            if found := rank_group.known_difference():
                return found
        place = self._place()
        _tell(place)
        circle, places = _path_from(place)
        before, self.suspect = self.suspect, [(each, places[each].number) for each in circle]
        self.sightings = self.sightings + 1 if circle and self.suspect == before else 1
        if not circle or self.sightings < (2 if places[circle[-1]].number == ENDED else SIGHTINGS):
            return ""
        why = _as_message(circle, places)
        for other, number in self.suspect if places[circle[-1]].number != ENDED else ():
            _PLACES.write(f"{other}/why", [number, why])
        return why

    def _place(self) -> Place:
        place = Place(self.number)
        for rank_group in self.rank_groups:
            absent, present = rank_group.whereabouts()
            words = rank_group.words() if absent and not place.absent else place.words or rank_group.words()
            runs = [*place.runs, rank_group.run]
            place = Place(self.number, [*place.absent, *absent], [*place.present, *present], runs, words)
        return place

    def why_it_failed(self) -> str:
        """Why a collective of it has failed: an error of a rank for which it waited; empty for what is not known."""
        with suppress(RuntimeError, ValueError):  # the store may be what is lost
            path, places = _path_from(self._place())
            return _as_message(path, places) if path and places[path[-1]].number == ENDED else ""
        return ""

    def reason(self) -> str:
        """Why it will never end, as this rank has found or another one has said; empty for what is not known."""
        if self.why or not self.number:
            return self.why
        with suppress(RuntimeError, ValueError):  # the store may be what is lost
            for number, why in _PLACES.read(f"{dist.get_rank()}/why"):
                return str(why) if number == self.number else ""
        return ""

    def forget(self, why: str = "") -> None:
        """Tell the others that it is over, if they were told of it, or why it was ended."""
        if self.number:
            _tell(Place(ENDED, words=why) if why else Place())


def _tell(place: Place) -> None:
    with suppress(RuntimeError, ValueError):  # the store may be what is lost
        _PLACES.write(str(dist.get_rank()), place)


def _path_from(place: Place) -> tuple[list[int], dict[int, Place]]:
    """The ranks that wait for each other from this one on, to one whose run was ended or back; and all places."""
    rank = dist.get_rank()
    places, paths, known = {rank: place}, [([rank], True)], {rank}
    for path, may_be_present in paths:  # which grows: a search in breadth
        place = places[path[-1]]
        for other in (*place.absent, *(place.present if may_be_present else ())):
            if other == rank and other in place.absent:
                return path, places
            if other in known or not (read := _PLACES.read(str(other))):
                continue
            there = Place(*read[0])
            if there.number == ENDED:
                places[other] = there
                return [*path, other], places
            if other in place.absent or not set(there.runs).isdisjoint(place.runs):
                known.add(other)
                places[other] = there
                paths.append(([*path, other], other in place.absent))
    return [], places


def _as_message(circle: list[int], places: dict[int, Place]) -> str:
    if places[circle[-1]].number == ENDED:
        rank, last = circle[0], circle[-1]
        return f"rank {rank} waits in {places[rank].words}, and rank {last} has got an error: {places[last].words}"
    pairs = zip(circle, [*circle[1:], circle[0]], strict=True)
    lines = [f"    rank {rank} waits for rank {other} in {places[rank].words}" for rank, other in pairs]
    return (
        f"ranks {', '.join(map(str, sorted(circle)))} wait for each other, because they went different ways:\n"
        + "\n".join(lines)
        + "\nA usual cause: one of the ranks that share experts gets rows for them, and another one does not. Every "
        "rank must make the same calls: let zero rows (x[:0]) go through what has no input, and add 0 times the "
        "output's sum to the loss."
    )


class _Watch:
    """The runs that are under way in this process, and the thread that looks at them."""

    def __init__(self) -> None:
        self.runs: list[StalledRun] = []
        self.rank_groups: weakref.WeakSet[RankGroup] = weakref.WeakSet()
        self.was_ended = False
        self.numbers = itertools.count(1)
        threading.Thread(target=self._look, name="fxshard_stalled_runs", daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(TELL_AFTER_S)
            with suppress(RuntimeError, ValueError):  # the store is gone, or the group; or a run has begun on a new one
                for rank_group in self.rank_groups:
                    rank_group.tell()
            for run in self.runs[-1:]:  # others have begun it, and wait for it
                if not run.why and time.monotonic() >= run.next_look:
                    self._look_at(run)

    def _look_at(self, run: StalledRun) -> None:
        run.next_look = time.monotonic() + AFTER_S
        run.number, why = run.number or next(self.numbers), ""
        try:
            why = run.look()
        except (RuntimeError, ValueError) as lost:  # the store is gone, or the group: the wait fails by itself
            _log.info("fxshard: the store cannot say whether a run is stalled: %s", lost)
        if self.runs[-1:] != [run]:
            run.forget()  # it has ended since, or begun another one
            return
        if why:
            run.why = why
            _tell(Place(ENDED, words=why))  # before the others see connections close
            if not gloo.disconnect({launch.group.partition(BY)[0] for launch in run.launches}):
                _log.error("fxshard: a run will never end, for other ranks went another way: %s", why)


@functools.cache
def _watch_in(_process: int) -> _Watch:
    """Made anew in a process that was forked, for threads are not."""
    return _Watch()


@contextmanager
def watching(
    rank_groups: Collection[RankGroup], launches: Sequence[Launch], *, goes_on: bool = True
) -> Iterator[StalledRun]:
    """Around a run that makes these launches; `goes_on`: this rank makes another try where its last run was ended."""
    run = StalledRun(rank_groups, launches, time.monotonic() + AFTER_S)
    if not rank_groups:
        yield run
        return
    watch, words = _watch_in(os.getpid()), ""
    if watch.was_ended and goes_on:
        watch.was_ended = False
        _tell(Place())
    watch.rank_groups.update(rank_groups)
    watch.runs.append(run)
    try:
        yield run
    except Exception as error:
        is_ours = isinstance(error, FxshardError)
        why = run.reason() or ("" if is_ours or not isinstance(error, RuntimeError) else run.why_it_failed())
        words = why or ("" if is_ours else f"{type(error).__name__}: {error}")
        watch.was_ended = bool(words)
        run.number = run.number or (next(watch.numbers) if words else 0)
        for rank_group in rank_groups if why else ():
            rank_group.forget()
        if not why or is_ours:
            raise
        raise RankMismatchError(why) from error
    finally:
        watch.runs.remove(run)
        run.forget(words)
