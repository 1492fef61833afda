"""Run the demo from start to verdict, and each of its ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import closing
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxshard.tools.demo.config import DemoConfig
from fxshard.tools.demo.events import Event
from fxshard.tools.demo.llama import check_installed
from fxshard.tools.demo.outcome import Outcome
from fxshard.tools.demo.show import DemoConsole, show_end
from fxshard.tools.demo.text import read_corpus
from fxshard.tools.demo.train import train_sharded, train_unsharded
from fxshard.tools.launch.rank_process import RankPlace, join, reporting
from fxshard.tools.launch.ranks import RankProcesses

if TYPE_CHECKING:
    from rich.console import Console


def run_demo(config: DemoConfig, console: Console) -> int:
    """Train sharded, then unsharded, showing both; return 1 if no loss fell or they differ too much, else 0."""
    read_corpus(config.seq_len + 1)
    if config.model == "hf:llama":
        check_installed()
    started = time.perf_counter()
    outcome = Outcome(config)
    with DemoConsole(console, outcome) as show, closing(events_of_ranks(config)) as events:
        for event in events:
            outcome.add(event)
            show.on(event)
    show_end(console, outcome, time.perf_counter() - started)
    return 1 if outcome.problems() else 0


def events_of_ranks(config: DemoConfig) -> Generator[Event]:
    """Start `config.ranks` processes and yield what they tell; however the iteration ends, no process is left."""
    num_threads = max(1, (os.cpu_count() or 1) // config.ranks)
    ranks = RankProcesses(
        config, rank_main, out=config.out, num_threads=num_threads, ranks=config.ranks, stall_s=config.stall_s
    )
    try:
        ranks.start()
        yield from ranks.events()
    finally:
        ranks.stop()


def rank_main(place: RankPlace, config: DemoConfig, events: Connection) -> None:
    """Train as one rank, and tell the parent; what is raised goes to the log, and the status is 1."""
    with reporting(place, config.out, events):
        join(place, config.ranks, device=config.device, stall_s=config.stall_s)
        train_sharded(config, place.rank, init_device_mesh(config.device, (config.ranks,)), events.send)
        dist.destroy_process_group()
        if place.rank == 0 and config.compare:
            torch.set_num_threads(min(place.num_threads * config.ranks, os.cpu_count() or 1))  # others are done
            train_unsharded(config, events.send)
