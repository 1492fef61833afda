"""The backend of process groups whose gloo has one thread."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard.runtime import gloo
from tests.ranks import two_ranks
from tests.watching import said_by

BURSTS, IN_FLIGHT = 2_000, 8


def gloo_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


@two_ranks
def test_groups_have_one_thread_and_their_ranks_and_timeout() -> None:
    half = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    assert dist.get_backend(half) == gloo.BACKEND
    assert gloo_of(half).options._threads == 1
    assert gloo_of(half).options._timeout == timedelta(seconds=77)
    gathered = torch.empty(2)
    dist.all_gather_into_tensor(gathered, torch.full((1,), float(dist.get_rank())), group=half)
    assert gathered.tolist() == [0, 1]


@pytest.mark.commands
@two_ranks
def test_overlapping_gathers_do_not_kill_the_rank() -> None:
    """On a group with two threads, every other run of this ends in an abort or a segmentation fault."""
    group = dist.group.WORLD
    assert group is not None
    ops, sent = torch.ops._c10d_functional, torch.ones(4)
    for _ in range(BURSTS):
        for gathered in [ops.all_gather_into_tensor(sent, 2, group.group_name) for _ in range(IN_FLIGHT)]:
            ops.wait_tensor(gathered)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged; that it has been said before is forgotten."""
    gloo._say_once.cache_clear()
    with said_by(gloo.__name__) as lines:
        yield lines


@two_ranks
def test_nothing_is_said_of_it() -> None:
    gloo._say_once.cache_clear()
    fxshard.fully_shard(nn.Linear(4, 4))
    assert gloo._say_once.cache_info().currsize == 0


@two_ranks
def test_torchs_own_is_warned_of_once() -> None:
    gloo._say_once.cache_clear()
    own = DeviceMesh.from_group(dist.new_group([0, 1], backend="gloo"), "cpu")
    for _ in range(2):
        fxshard.fully_shard(nn.Linear(4, 4), mesh=own)
    assert gloo._say_once.cache_info() == (1, 1, None, 1)


def test_the_warning_says_what_to_do(said: list[str]) -> None:
    gloo._say_once()
    (line,) = said
    assert line.startswith("fxshard: torch's gloo corrupts memory once in many thousand collectives that overlap")
    assert 'torch.distributed.init_process_group("fxshard_gloo")' in line


def test_another_backend_is_not_warned_of(mesh: DeviceMesh, said: list[str]) -> None:
    gloo.warn_of_two_threads(mesh)
    gloo.warn_of_two_threads(init_device_mesh("cpu", (2,)))
    assert said == []


@two_ranks
def test_finds_the_thread_of_a_group() -> None:
    assert len(list(gloo._threads())) >= 1


def test_the_process_ends_when_the_thread_has_nothing_left_to_do() -> None:
    """Otherwise Python ends the thread while it gives back tensors, and the rank dies: [Note: gloo]."""
    data, ended = b"0" * (1 << 26), list[bool]()

    def be_busy() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(gloo._THREAD)
        began.set()
        for _ in range(4):
            hashlib.sha256(data)  # without Python's lock
        ended.append(True)

    began, thread = threading.Event(), threading.Thread(target=be_busy)
    thread.start()
    assert began.wait(10)
    gloo._settle(60)
    assert ended
    thread.join()


def test_the_process_ends_though_the_thread_hangs() -> None:
    stop, began = threading.Event(), threading.Event()

    def be_busy() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(gloo._THREAD)
        began.set()
        while not stop.is_set():
            hashlib.sha256(b"0" * (1 << 20))

    thread = threading.Thread(target=be_busy)
    thread.start()
    assert began.wait(10)
    before = time.monotonic()
    gloo._settle(0.05)
    assert time.monotonic() - before < 10
    stop.set()
    thread.join()
