"""Gloo ranks for one function: any number of them, and they may be killed.

A server that has imported torch forks them, so that starting them costs little.
"""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from fxshard.runtime import gloo

TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended."""

    result: Any = None  # what the function returned
    error: str | None = None  # the traceback of what it raised
    killed: bool = False  # whether it was killed by SIGKILL


@functools.cache
def server() -> multiprocessing.context.ForkServerContext:
    """Return the server that forks ranks; it has imported what most of them need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.state.bodies"])
    return context


def _main(pipe: connection.Connection, store: str, rank: int, size: int, function: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            gloo.BACKEND,
            store=FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT_S / 2),
        )
        answer = io.BytesIO()  # torch's way through a pipe would share memory with a process that has ended
        torch.save(function(*args), answer)
        pipe.send((answer.getvalue(), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # no clean-up of a process group whose ranks may be dead


def start(size: int, function: Callable[..., Any], *args: Any) -> list[Ended]:
    """Run `function(*args)` on `size` ranks; say how each ended."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = server().Pipe(duplex=False)
            arguments = (theirs, str(Path(folder) / "store"), rank, size, function, args)
            process = server().Process(target=_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        deadline = time.monotonic() + TIMEOUT_S
        try:
            return [_end_of(pipe, process, deadline) for pipe, process in zip(pipes, processes, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _end_of(pipe: connection.Connection, process: Any, deadline: float) -> Ended:
    assert pipe.poll(max(0.0, deadline - time.monotonic())), "a rank did not end"
    try:
        answer, error = pipe.recv()
    except EOFError:
        process.join(5)
        return Ended(killed=process.exitcode == -signal.SIGKILL)
    if error is not None:
        return Ended(error=error)
    return Ended(result=torch.load(io.BytesIO(answer), weights_only=False))


def run(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(*args)` on `size` ranks and return what each returned."""
    ends = start(size, function, *args)
    for rank, end in enumerate(ends):
        assert end.error is None, f"rank {rank}: {end.error}"
        assert not end.killed, f"rank {rank} was killed"
    return [end.result for end in ends]
