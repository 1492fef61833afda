"""One rank, from inside its process: where it meets the others, where its output goes, and how it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from fxshard.runtime import gloo


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """What a rank is told of itself, and where it meets the others: at a TCPStore that another process serves."""

    rank: int  # over all machines
    local_rank: int  # on its machine; the number of its GPU
    num_threads: int
    port: int
    host: str = "127.0.0.1"
    prefix: str = "fxshard"  # of what this group of ranks writes into the store
    one_machine: bool = True  # whether all ranks are on this one, so that gloo can stay inside it


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A rank raised an exception, here in one line, and is about to exit; the traceback is in its log."""

    rank: int
    error: str


def log_path(folder: Path, rank: int) -> Path:
    """Where the standard output and error of `rank` go."""
    return folder / f"rank{rank}.log"


@contextlib.contextmanager
def reporting(place: RankPlace, folder: Path, events: Connection) -> Iterator[None]:
    """Send output to the log of the rank, and errors to the parent; the process ends when its parent does."""
    _redirect_output(log_path(folder, place.rank))
    threading.Thread(target=_end_with_parent, name="fxshard-parent", daemon=True).start()
    try:
        torch.set_num_threads(place.num_threads)
        yield
    except BrokenPipeError:  # the parent is gone, and nobody else reads it
        sys.exit(1)
    except Exception as error:  # a process boundary: whatever it is, the parent reports it
        traceback.print_exc()
        events.send(Failed(rank=place.rank, error=_one_line(error)))
        sys.exit(1)


def join(place: RankPlace, ranks: int, *, device: str, stall_s: float) -> None:
    """Make the default process group: NCCL, one GPU per rank, on "cuda", else gloo; see [Note: gloo] for which."""
    gpu = torch.device("cuda", place.local_rank) if device == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)  # before anything else: a rank that does not choose takes memory of GPU 0
    dist.init_process_group(
        gloo.BACKEND if gpu is None else "nccl",
        store=dist.PrefixStore(place.prefix, dist.TCPStore(place.host, place.port, is_master=False)),
        rank=place.rank,
        world_size=ranks,
        timeout=timedelta(seconds=stall_s),
        device_id=gpu,
    )


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # nobody is left to tell


def _redirect_output(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _one_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
