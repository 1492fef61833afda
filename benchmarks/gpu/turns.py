"""Several systems on one device, each in a process of its own, that take turns.

[Note: turns on one GPU]
As in `fxshard bench` every system has a process, so that guards, caches, memory statistics and crashes are its own; see
[Note: interleaving]. They share one device: a turn is a few steps without interruption, of which the first are not
timed, and after it the process gives back what its allocator keeps. What stays is a shard and its optimizer state.
The speed of the link is changed between turns, not the processes: each system compiles once, with and once without
activation checkpointing.

Time is planned as it is measured: before each setting the cost of all turns is estimated from those before, and what
does not fit is left out and named. What is there is written after each setting.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

from benchmarks.gpu.settings import Case, Link
from benchmarks.gpu.talk import Answer, Command, Job
from benchmarks.gpu.worker import rank_main
from fxshard.tools.bench.result import SystemResult
from fxshard.tools.bench.traffic import Traffic
from fxshard.tools.launch.ranks import RankError, RankProcesses

_PATIENCE_S = 60.0  # beyond what a command should take


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Time that may be spent."""

    start: float  # `time.time()` of the beginning
    seconds: float  # in all

    def at(self, share: float) -> float:
        """When so much of it is over, as `time.time()`."""
        return self.start + share * self.seconds

    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.time() - self.start


class Member:
    """A system in its process, from outside.

    Args:
        case: the system.
        job: what its process does.
        run: where to write down how it went.
        num_threads: of the process.
        end: `time.time()` after which no answer is waited for.
    """

    def __init__(self, case: Case, job: Job, run: SystemResult, *, num_threads: int, end: float) -> None:
        self.case, self.run = case, run
        self.step_s = 0.0
        self.traffic = Traffic()
        self._job, self._end = job, end
        self._ranks = RankProcesses(job, rank_main, out=job.out, num_threads=num_threads)
        self._is_over = False

    @property
    def is_alive(self) -> bool:
        """Whether it takes commands."""
        return not self._is_over

    def start(self, command: Command) -> None:
        """Start the process, and tell it what to do first; `answer` waits for it."""
        self._ranks.start()
        self._ranks.send(command)

    def send(self, command: Command) -> None:
        """Tell it what to do; `answer` waits for it."""
        self._ranks.send(command)

    def answer(self, deadline: float) -> Answer | None:
        """What it answers; `None` if it has failed, which is written down.

        Args:
            deadline: `time.time()` after which it counts as failed.
        """
        start, deadline = time.time(), min(deadline, self._end)
        try:
            answers = self._ranks.listen(max(0.0, deadline - start))
        except RankError as error:
            self._fail(str(error).splitlines()[0])
            return None
        if not answers:
            is_late = time.time() >= deadline
            waited = f"no answer after {time.time() - start:.0f} s; see {self._job.out}"
            self._fail(waited if is_late else "its process ended early")
            return None
        return cast(Answer, answers[0])

    def ask(self, command: Command, expected_s: float) -> Answer | None:
        """Tell it what to do and wait, if it takes long for several times what it should take."""
        self.send(command)
        return self.answer(time.time() + _PATIENCE_S + 5 * expected_s)

    def expected_s(self, link: Link, steps: int) -> float:
        """At most how long steps on a link take, if nothing of the transfers is hidden."""
        sent = (self.traffic.nbytes or 0) / (link.gigabytes_per_s * 1e9)
        sent += self.traffic.launches * link.latency_us * 1e-6
        return steps * (self.step_s + sent)

    def stop(self) -> None:
        """End the process."""
        if not self._is_over:
            self._is_over = True
            self._ranks.stop()

    def _fail(self, error: str) -> None:
        self.run.error = error
        self.stop()
