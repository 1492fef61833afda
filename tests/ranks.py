"""Two gloo ranks, started once per pytest process, that run the bodies of tests.

`two_ranks` turns a test into one whose body runs on both ranks of a shared pool, inside an initialised process group:

    @two_ranks
    @pytest.mark.parametrize("lower", ["eager", "inductor"])
    def test_trains(lower: str) -> None:
        assert dist.get_world_size() == 2

The body is found by its qualified name and its arguments are pickled, so it must stand at module level and take no
fixtures. A failure shows the traceback of the rank (of both, where they differ). A rank that dies, hangs or leaves its
group out of step fails its test, and the pool starts anew for the next one. `fresh_ranks` does the same in two
processes of its own, for a body that destroys its process group.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, ParamSpec, Protocol, overload

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch._dynamo import guards

from fxshard import live_objects
from fxshard.cost import measured
from fxshard.hardware import TABLE
from fxshard.runtime import gloo
from fxshard.runtime.process_groups import align_names
from tests.state.processes import server

WORLD_SIZE = 2
TIMEOUT_S = 120.0
START_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 30.0
# How long a rank may go on after the other one has failed: longer than one compile, shorter than a collective.
GRACE_S = 20.0

Params = ParamSpec("Params")


class RankError(AssertionError):
    """A body failed on a rank, or a rank died, hung or fell out of step."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of a module-level function, found by name in the worker."""

    module: str
    qualname: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any], kwargs: dict[str, Any]) -> Job:
        return cls(module=function.__module__, qualname=function.__qualname__, kwargs=kwargs)

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    def __call__(self) -> Any:
        found: Any = importlib.import_module(self.module)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return getattr(found, "on_ranks", found)(**self.kwargs)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank sends back: the pickled result, or the text of its traceback."""

    result: bytes | None = None
    error: str | None = None


# ---- in the worker


def group_folder() -> Path:
    """Return the folder in which the ranks of this pool meet."""
    return Path(os.environ["FXSHARD_TEST_RANKS"])


def join_group(name: str) -> None:
    """Initialise this rank's default process group; `name` must be new to its pool."""
    store = FileStore(str(group_folder() / name), WORLD_SIZE)
    dist.init_process_group(
        gloo.BACKEND,
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def settle() -> None:
    """Bring the rank back to how a test expects it, and check that both ranks are still in step."""
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
    gc.collect()
    # What is left belongs to libraries. To look through it takes a quarter of the time of a test, so it stays frozen
    # where fxshard searches, too: a body makes what is to be found.
    gc.freeze()
    vars(live_objects)["_thaw"] = lambda: None  # to count the frozen ones takes as long as to search
    if not dist.is_initialized():
        raise RankError("the body left no process group; run it with fresh_ranks")
    world: Any = dist.group.WORLD
    try:
        world.monitored_barrier(timedelta(seconds=SETTLE_TIMEOUT_S / 4), False)
    except RuntimeError as error:
        raise RankError(f"the body left the ranks out of step: {error}") from None
    align_names(world)  # FSDP2 makes groups, too
    if measured.numbers_for([world], torch.device("cpu")).source != TABLE:
        raise RankError("the body left a group whose link was measured; end in a new one: graphs count on the numbers")


def _outcome_of(job: Job) -> Outcome:
    try:
        return Outcome(result=pickle.dumps(job()))
    except BaseException as error:  # a test may end with pytest.fail, which is no Exception
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        return Outcome(error="".join(traceback.format_exception(type(error), error, frames)))


def _serve(rank: int, pipe: connection.Connection, folder: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        FXSHARD_TEST_RANKS=folder,
        HF_HUB_OFFLINE="1",
        TORCHINDUCTOR_COMPILE_THREADS="1",
    )
    torch.set_num_threads(1)
    vars(guards)["profile_guard_manager"] = lambda *_: 0.0  # for a log, and it flushes the caches of the processor
    gc.set_threshold(50_000, 20, 20)  # objects; to compile makes many that stay
    # What C++ says before it aborts is said there, too.
    with (Path(folder) / f"stacks{rank}").open("a") as stacks:
        os.dup2(stacks.fileno(), sys.stderr.fileno())
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(file=stacks, all_threads=True)  # a rank that crashes says where
        pipe.send(_outcome_of(Job.of(join_group, {"name": "group"})))
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            pipe.send(_outcome_of(job))


# ---- in the parent


def _describe_death(process: multiprocessing.process.BaseProcess) -> str:
    process.join(timeout=5)
    code = process.exitcode
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _report(job: Job, errors: Sequence[str | None]) -> str:
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    if len(failed) == len(errors) and len(set(errors)) == 1:
        return f"{job} failed on all ranks:\n{errors[0]}"
    return "\n".join(f"{job} failed on rank {rank}:\n{errors[rank]}" for rank in failed)


class RankPool:
    """Two worker processes in one gloo group; they start at the first `run`, and anew after one was lost."""

    def __init__(self, context: multiprocessing.context.BaseContext | None = None) -> None:
        """`context` starts the processes; by default a server forks them, which costs little."""
        self._context: Any = context or server()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[connection.Connection] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *, timeout: float = TIMEOUT_S, keep: bool = True, **kwargs: Any
    ) -> list[Any]:
        """Run `function(**kwargs)` on each rank.

        Args:
            function: A module-level function, or a test decorated with `two_ranks`.
            timeout: Seconds after which both ranks are ended and their stacks reported.
            keep: Whether the pool lives on; without it nothing is checked after the body.
            **kwargs: Passed on; pickled.

        Returns:
            The result of each rank.
        """
        if not self._processes:
            self._start()
        job = Job.of(function, kwargs)
        outcomes = self._exchange(job, timeout)
        errors = [outcome.error for outcome in outcomes]
        if keep:
            self._settle_after(job, errors)
        if any(error is not None for error in errors):
            raise RankError(_report(job, errors))
        return [pickle.loads(outcome.result) for outcome in outcomes if outcome.result is not None]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        for rank in range(WORLD_SIZE):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, theirs, self._folder.name), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        job = Job.of(join_group, {})
        errors = [outcome.error for outcome in self._collect(job, START_TIMEOUT_S)]
        if any(error is not None for error in errors):
            self.close()
            raise RankError(_report(job, errors))

    def _settle_after(self, job: Job, errors: Sequence[str | None]) -> None:
        """Check the ranks after `job`; a body that failed already is not blamed twice."""
        failed = any(error is not None for error in errors)
        try:
            unsettled = [outcome.error for outcome in self._exchange(Job.of(settle, {}), SETTLE_TIMEOUT_S)]
        except RankError:
            if not failed:
                raise
            return
        if any(error is not None for error in unsettled):
            self.close()
            if not failed:
                raise RankError(_report(job, unsettled))

    def _exchange(self, job: Job, timeout: float) -> list[Outcome]:
        for pipe in self._pipes:
            pipe.send(job)
        return self._collect(job, timeout)

    def _collect(self, job: Job, timeout: float) -> list[Outcome]:
        """Wait for the answer of each rank; end the pool where one does not come."""
        outcomes: dict[int, Outcome] = {}
        began = time.monotonic()
        deadline = began + timeout
        while len(outcomes) < WORLD_SIZE:
            waiting = [rank for rank in range(WORLD_SIZE) if rank not in outcomes]
            ready = connection.wait([self._pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(job, outcomes, f"gave no answer within {time.monotonic() - began:.0f} s")
            for rank in waiting:
                if self._pipes[rank] not in ready:
                    continue
                try:
                    outcomes[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._give_up(job, outcomes, f"rank {rank} died: {_describe_death(self._processes[rank])}")
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return [outcomes[rank] for rank in range(WORLD_SIZE)]

    def _give_up(self, job: Job, outcomes: dict[int, Outcome], why: str) -> None:
        stacks = {rank: self._stack_of(rank) for rank in range(WORLD_SIZE) if rank not in outcomes}
        self.close()
        lines = [f"{job}: {why}"]
        lines += [f"rank {rank} failed:\n{done.error}" for rank, done in outcomes.items() if done.error is not None]
        lines += [f"rank {rank} was here:\n{stack}" for rank, stack in stacks.items() if stack]
        raise RankError("\n".join(lines))

    def _stack_of(self, rank: int) -> str:
        """Return the stacks of all threads of a rank: where it is, or where it crashed."""
        pid = self._processes[rank].pid
        if self._folder is None or pid is None:
            return ""
        if self._processes[rank].is_alive():
            os.kill(pid, signal.SIGUSR1)
            time.sleep(1.0)
        return (Path(self._folder.name) / f"stacks{rank}").read_text()


@functools.cache
def shared_pool() -> RankPool:
    """Return the pool of this pytest session; as in training, each rank has a seed of its own for hashes."""
    return RankPool(multiprocessing.get_context("spawn"))


# ---- decorators of tests


class Decorator(Protocol):
    """Turns a body that runs on the ranks into a test."""

    def __call__(self, body: Callable[Params, None], /) -> Callable[Params, None]: ...


def _on_ranks(body: Callable[Params, None], run: Callable[..., Any]) -> Callable[Params, None]:
    @functools.wraps(body)
    def test(*args: Params.args, **kwargs: Params.kwargs) -> None:
        __tracebackhide__ = True
        assert not args, "pytest passes arguments by name"
        failure = ""
        try:
            run(test, **kwargs)
        except RankError as error:
            failure = str(error)
        if failure:
            pytest.fail(failure, pytrace=False)

    vars(test)["on_ranks"] = body
    return pytest.mark.multi_rank(test)


@overload
def two_ranks(body: Callable[Params, None], /) -> Callable[Params, None]: ...
@overload
def two_ranks(*, timeout: float) -> Decorator: ...
def two_ranks(body: Callable[..., None] | None = None, /, *, timeout: float = TIMEOUT_S) -> Any:
    """Run the test's body on both ranks of the shared pool.

    Args:
        body: A module-level function without fixtures; what pytest parametrizes must be picklable.
        timeout: Seconds after which the test fails.
    """
    if body is None:
        return functools.partial(two_ranks_within, timeout=timeout)
    return two_ranks_within(body, timeout=timeout)


def two_ranks_within(body: Callable[Params, None], *, timeout: float) -> Callable[Params, None]:
    """Run the test's body on both ranks of the shared pool, within `timeout` seconds."""

    def run(test: Callable[..., None], **kwargs: Any) -> None:
        shared_pool().run(test, timeout=timeout, **kwargs)

    return _on_ranks(body, run)


def fresh_ranks(body: Callable[Params, None]) -> Callable[Params, None]:
    """Run the test's body on two ranks of its own, whose process group it may destroy."""

    def run(test: Callable[..., None], **kwargs: Any) -> None:
        with RankPool() as pool:
            pool.run(test, keep=False, **kwargs)

    return _on_ranks(body, run)
