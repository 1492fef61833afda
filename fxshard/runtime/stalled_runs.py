"""Runs that wait for each other because ranks went different ways: found while they wait, and ended.

[Note: stalled runs]
On a path that is known no rank reads what the others write before it launches ([Note: agreement] in `rank_check.py`).
Where ranks then wait in collectives of different process groups, none of them fails, and all wait until the timeout of
the groups, half an hour. So a thread looks at each run that has not ended after `AFTER_S`: does another rank write
something else under the same number, then the collective will never come. On `fxshard_gloo` the thread shuts the
connections of the run's groups down, the wait fails, and what the store knows becomes the error. Other backends have no
such connections of ours: there the thread logs what differs. A rank that is slow writes nothing else, and is waited
for.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fxshard.runtime import gloo
from fxshard.runtime.rank_group import RankGroup

AFTER_S = 3.0
"""When a run is looked at first, and how often from then on."""

_log = logging.getLogger(__name__)


@dataclass
class _StalledRun:
    rank_groups: Collection[RankGroup]
    group_names: Collection[str]
    next_look: float


class _Watch:
    """The runs that are under way in this process, and the thread that looks at them."""

    def __init__(self) -> None:
        self.runs: dict[int, _StalledRun] = {}
        self.numbers = itertools.count()
        threading.Thread(target=self._look, name="fxshard_stalled_runs", daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(AFTER_S / 3)
            for number, run in list(self.runs.items()):
                if time.monotonic() < run.next_look:
                    continue
                run.next_look = time.monotonic() + AFTER_S
                if why := _difference(run):
                    self.runs.pop(number, None)
                    _end(run, why)


def _difference(run: _StalledRun) -> str:
    """What another rank does otherwise in the run that should be the same; empty if nothing is known."""
    try:
        return next(filter(None, (rank_group.known_difference() for rank_group in run.rank_groups)), "")
    except (RuntimeError, ValueError) as lost:  # the store is gone, or the group: the wait fails by itself
        _log.info("fxshard: the store cannot say whether a run is stalled: %s", lost)
        return ""


def _end(run: _StalledRun, why: str) -> None:
    if not gloo.disconnect(run.group_names):
        _log.error("fxshard: a run will never end, for other ranks went another way: %s", why)


@functools.cache
def _watch_in(_process: int) -> _Watch:
    """Made anew in a process that was forked, for threads are not."""
    return _Watch()


@contextmanager
def watching(rank_groups: Collection[RankGroup], group_names: Collection[str]) -> Iterator[None]:
    """Around a run that these rank groups agree on, and that launches on these process groups."""
    if not rank_groups:
        yield
        return
    watch = _watch_in(os.getpid())
    number = next(watch.numbers)
    watch.runs[number] = _StalledRun(rank_groups, group_names, time.monotonic() + AFTER_S)
    try:
        yield
    finally:
        watch.runs.pop(number, None)
