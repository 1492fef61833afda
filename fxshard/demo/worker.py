"""The life of one rank's process."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxshard.demo.config import DemoConfig
from fxshard.demo.events import Failed
from fxshard.demo.train import Tell, train_sharded, train_unsharded
from fxshard.runtime import gloo


def log_path(folder: Path, rank: int) -> Path:
    """Where the standard output and error of `rank` go."""
    return folder / f"rank{rank}.log"


def rank_main(rank: int, config: DemoConfig, port: int, num_threads: int, events: Connection) -> None:
    """Train as `rank`, and tell the parent through `events`; what is raised goes to the log, and the status is 1.

    Args:
        rank: Which rank this process is.
        config: What to train.
        port: Port of the parent's TCPStore on this machine.
        num_threads: Cores this rank may use while all ranks run.
        events: Write end of a pipe to the parent.
    """
    with reporting(rank, config.out, events):
        _train(rank, config, port, num_threads, events.send)


@contextlib.contextmanager
def reporting(rank: int, folder: Path, events: Connection) -> Iterator[None]:
    """Send output to the log of `rank`; what is raised ends the process with status 1 and is told to the parent."""
    _redirect_output(log_path(folder, rank))
    try:
        yield
    except BrokenPipeError:  # the parent is gone, and with it whoever wanted to know
        sys.exit(1)
    except Exception as error:  # a process boundary: whatever it is, the parent reports it
        traceback.print_exc()
        events.send(Failed(rank=rank, error=_one_line(error)))
        sys.exit(1)


def join(rank: int, ranks: int, *, device: str, port: int, stall_s: float) -> None:
    """Make the default process group of the ranks on this machine: NCCL, one GPU per rank, on "cuda", else gloo.

    See [Note: gloo] for which.
    """
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else gloo.BACKEND,
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=stall_s),
    )


def _train(rank: int, config: DemoConfig, port: int, num_threads: int, tell: Tell) -> None:
    torch.set_num_threads(num_threads)
    join(rank, config.ranks, device=config.device, port=port, stall_s=config.stall_s)
    train_sharded(config, rank, init_device_mesh(config.device, (config.ranks,)), tell)
    dist.destroy_process_group()
    if rank == 0 and config.compare:
        torch.set_num_threads(min(num_threads * config.ranks, os.cpu_count() or 1))  # the other ranks are done
        train_unsharded(config, tell)


def _redirect_output(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _one_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
