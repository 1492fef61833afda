"""The processes that torchrun starts for one benchmark: each has one rank of every system, and all agree.

[Note: peers]
Under torchrun every process runs the loop of [Note: interleaving] in `tools/bench/run.py`, starts one rank of each
system and listens to it alone. All must decide alike: that the system is ready, has taken its step, or has failed. So
they meet in ticks: each listens until its rank has told something, half a second at most; then all exchange what they
have. This ends when all have heard, or when the rank of one has failed; then all stop theirs. So a rank that waits for
a dead one in a collective is ended by its own parent, where NCCL would let it wait.

Ticks go through a process group of the parents alone (`fxshard_gloo`). When a parent dies, its connections break, and
the others end; a rank ends with its parent, and a parent with its launcher. The ranks of a system join a group of their
own, in the launcher's store, under a prefix of their own, so no port is needed that may be taken or closed.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from fxshard.errors import ConfigError, FxshardError
from fxshard.options import LauncherEnvironment
from fxshard.runtime import gloo
from fxshard.tools.launch.rank_process import RankPlace
from fxshard.tools.launch.ranks import RankError, environment_of_ranks

T = TypeVar("T")

TICK_S: Final = 0.5  # after which a failure elsewhere is heard of; long enough not to disturb a timed step
_LEAST_TIMEOUT_S: Final = 60.0  # for a parent that prints, stops its rank or imports the model


class PeerError(FxshardError, RuntimeError):
    """Another process of the benchmark, or the launcher, is gone; nothing can go on."""


@dataclass(frozen=True, kw_only=True)
class _Heard:
    """What one process tells in a tick: the events of its ranks, unless some are missing, or what became of one."""

    events: list[Any] | None = None
    error: str | None = None
    blame: tuple[bool, float] = (True, math.inf)  # the smallest is shown: of killed ranks, else the earliest


class Peers:
    """This process among those that run the same benchmark; see [Note: peers].

    `launched` is `None` if it is the only one and starts all ranks. `exchange` gives what every process has given, in
    order of their ranks; all call it together.
    """

    def __init__(
        self, launched: LauncherEnvironment | None = None, exchange: Callable[[Any], list[Any]] = lambda own: [own]
    ) -> None:
        self.launched = launched
        self.rank = 0 if launched is None else launched.rank
        self._exchange = exchange
        self._tick_s = math.inf if launched is None else TICK_S
        self._num_places = 0

    def gather(self, own: T) -> list[T]:
        """What every process has given, in order of their ranks."""
        return self._exchange(own)

    def collect(self, listen: Callable[[float], list[Any]], num_here: int) -> list[Any]:
        """Wait for an event of every rank, the same on every process; `listen` waits for the `num_here` here."""
        events: list[Any] = []
        while True:
            try:
                if len(events) < num_here:
                    events += listen(self._tick_s)
                own = _Heard(events=events if len(events) >= num_here else None)
            except RankError as error:
                own = _Heard(error=str(error), blame=(not error.was_killed, time.time()))
            heard: list[_Heard] = self.gather(own)
            if errors := [(one.blame, one.error) for one in heard if one.error is not None]:
                raise RankError(min(errors)[1])
            if all(one.events is not None for one in heard):
                return [event for one in heard for event in one.events or ()]

    def require(self, check: Callable[[], T]) -> T:
        """Do something on every process that has to work on all of them."""
        result: T | None = None
        error: FxshardError | None = None
        try:
            result = check()
        except FxshardError as raised:
            error = raised
        texts = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise ConfigError(f"rank {rank}: {text}")
        return result  # type: ignore[return-value] # without an error it is check's

    def next_place(self) -> RankPlace | None:
        """Where the next rank that is started here meets those of the other processes; `None` if all start here."""
        if self.launched is None:
            return None
        self._num_places += 1
        return RankPlace(
            rank=self.launched.rank,
            local_rank=self.launched.local_rank,
            num_threads=1,
            host=self.launched.host,
            port=self.launched.port,
            prefix=f"fxshard/bench/{self.launched.attempt}/{self._num_places}",
            one_machine=self.launched.is_one_machine,
        )


@contextlib.contextmanager
def joined(launched: LauncherEnvironment, timeout_s: float) -> Iterator[Peers]:
    """Meet the other processes of the launcher; one that is silent for `timeout_s` (60 at least) counts as gone."""
    launcher = os.getppid()

    def exchange(own: Any) -> list[Any]:
        if os.getppid() != launcher:
            raise PeerError("the launcher of this benchmark is gone; nothing can go on.")
        everything: list[Any] = [None] * launched.world_size
        with _peers_that_are_gone():
            dist.all_gather_object(everything, own)
        return everything

    with _peers_that_are_gone(), environment_of_ranks(1, on_loopback=launched.is_one_machine):
        dist.init_process_group(
            gloo.BACKEND,
            init_method="env://",
            rank=launched.rank,
            world_size=launched.world_size,
            timeout=timedelta(seconds=max(timeout_s, _LEAST_TIMEOUT_S)),
        )
    try:
        yield Peers(launched, exchange)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _peers_that_are_gone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, FxshardError):
            raise
        first = (str(error).splitlines() or [""])[0].partition(". ")[0]  # gloo goes on with advice
        raise PeerError(f"another process of this benchmark is gone or cannot be reached: {first}") from error
