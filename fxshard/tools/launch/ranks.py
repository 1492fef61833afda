"""Processes of ranks, from outside: start them, pass on what they tell, and leave none behind."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NoReturn

from torch import multiprocessing
from torch.distributed import TCPStore

from fxshard.errors import FxshardError
from fxshard.tools.launch.rank_process import Failed, RankPlace, log_path

_GRACE_S: Final = 2.0  # for a process to end by itself


class RankError(FxshardError, RuntimeError):
    """A rank died, raised or fell silent, so the others were stopped; one that `was_killed` is to blame first."""

    def __init__(self, message: str, *, was_killed: bool = False) -> None:
        super().__init__(message)
        self.was_killed = was_killed


Main = Callable[[RankPlace, Any, Connection], None]
"""What a rank runs, a function of a module: its place, the job, and a pipe to the parent."""


class RankProcesses:
    """Processes on this machine, one per rank, each with a pipe to this process; the code that starts them stops them.

    They hand `job` to `main`, write logs to the folder `out`, and may use `num_threads` cores each. It is an error if
    none sends a message for `stall_s` seconds. `place` is that of the one rank that is started here, if others start
    the others; by default all `ranks` are, and meet at a store of this process.
    """

    def __init__(
        self,
        job: object,
        main: Main,
        *,
        out: Path,
        num_threads: int,
        ranks: int = 1,
        stall_s: float = math.inf,
        place: RankPlace | None = None,
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._job, self._main = job, main
        self._out, self._num_threads, self._stall_s = out, num_threads, stall_s
        self._store: TCPStore | None = None
        if place is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port, numbers = self._store.port, range(ranks)
            self._places = [RankPlace(rank=i, local_rank=i, num_threads=num_threads, port=port) for i in numbers]
        else:
            self._places = [dataclasses.replace(place, num_threads=num_threads)]
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._listening: set[Connection] = set()
        self._heard_at = 0.0

    @property
    def num_here(self) -> int:
        """Processes that `start` starts."""
        return len(self._places)

    def start(self) -> None:
        """Start all processes."""
        context = multiprocessing.get_context("spawn")
        on_loopback = all(place.one_machine for place in self._places)
        with _ranks_ignore_ctrl_c(), environment_of_ranks(self._num_threads, on_loopback=on_loopback):
            for place in self._places:
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=self._main, args=(place, self._job, theirs), name=f"fxshard-rank{place.rank}"
                )
                process.start()
                theirs.close()  # so that the end of the process ends the pipe
                self._processes.append(process)
                self._pipes.append(ours)
        self._listening = set(self._pipes)
        self._heard_at = time.monotonic()

    def send(self, message: object) -> None:
        """Send a message to every rank here; that a rank is gone shows in `events`."""
        self._heard_at = time.monotonic()  # they were silent because they had nothing to do
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(message)

    def events(self) -> Iterator[Any]:
        """Yield what the ranks tell, until all have ended well."""
        while self._listening:
            yield from self.listen()

    def listen(self, timeout_s: float = math.inf) -> list[Any]:
        """Return what the ranks tell next; nothing if the time is over, or if a rank has ended well."""
        if not self._listening:
            raise RankError(f"the ranks ended early; see {self._out}.")
        left_s = self._heard_at + self._stall_s - time.monotonic()
        ready = wait(list(self._listening), timeout=max(0.0, min(timeout_s, left_s)))
        if not ready and left_s <= timeout_s:
            raise RankError(f"no rank has made progress for {self._stall_s:g} s; see {self._out}.")
        events = []
        for pipe in (pipe for pipe in self._pipes if pipe in ready):
            self._heard_at = time.monotonic()
            try:
                event = pipe.recv()
            except (EOFError, ConnectionResetError):  # the latter if it has not read what it was sent
                self._listening.discard(pipe)
                self._check_ended_well(self._pipes.index(pipe))
                continue
            if isinstance(event, Failed):
                self._raise_for(event)
            events.append(event)
        return events

    def stop(self) -> None:
        """End every process: ask, then insist."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _check_ended_well(self, index: int) -> None:
        process = self._processes[index]
        process.join(_GRACE_S)
        if process.exitcode != 0:
            self._raise_for(Failed(rank=self._places[index].rank, error=f"exited with status {process.exitcode}"))

    def _raise_for(self, first: Failed) -> NoReturn:
        """Raise for the rank that is to blame: one that a signal ended goes before those that only miss it."""
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            for place, process in zip(self._places, self._processes, strict=True):
                if (process.exitcode or 0) < 0:
                    raise RankError(self._killed(place.rank, -(process.exitcode or 0)), was_killed=True)
            time.sleep(0.05)
        hint = ""
        if "InvalidCxxCompiler" in first.error:
            hint = "\nInductor needs a C++ compiler such as g++: install one, or run fxshard demo --lower eager."
        raise RankError(
            f"rank {first.rank} failed: {first.error}{hint}\n"
            f"Its output, traceback included: {log_path(self._out, first.rank)}"
        )

    def _killed(self, rank: int, number: int) -> str:
        hint = " The system does this when memory runs out." if number == signal.SIGKILL else ""
        return (
            f"rank {rank} was ended by {signal.Signals(number).name}, so the other ranks were stopped.{hint}\n"
            f"Its output: {log_path(self._out, rank)}"
        )


@contextlib.contextmanager
def _ranks_ignore_ctrl_c() -> Iterator[None]:
    """Start processes that leave Ctrl-C to this one, which then stops them; an ignored signal stays so across exec."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def environment_of_ranks(num_threads: int, *, on_loopback: bool = True) -> Iterator[None]:
    """Set, for the processes started inside, what is not set: few threads that sleep, gloo on the loopback."""
    wanted = {
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHINDUCTOR_COMPILE_THREADS": str(num_threads),
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
    }
    if on_loopback and sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
