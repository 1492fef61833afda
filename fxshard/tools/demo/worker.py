"""The life of one rank's process."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxshard.tools.demo.config import DemoConfig
from fxshard.tools.demo.train import Tell, train_sharded, train_unsharded
from fxshard.tools.launch.rank_process import RankPlace, join, reporting


def rank_main(place: RankPlace, config: DemoConfig, events: Connection) -> None:
    """Train as one rank, and tell the parent; what is raised goes to the log, and the status is 1."""
    with reporting(place, config.out, events):
        _train(place, config, events.send)


def _train(place: RankPlace, config: DemoConfig, tell: Tell) -> None:
    join(place, config.ranks, device=config.device, stall_s=config.stall_s)
    train_sharded(config, place.rank, init_device_mesh(config.device, (config.ranks,)), tell)
    dist.destroy_process_group()
    if place.rank == 0 and config.compare:
        torch.set_num_threads(min(place.num_threads * config.ranks, os.cpu_count() or 1))  # the other ranks are done
        train_unsharded(config, tell)
