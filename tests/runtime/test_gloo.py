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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard import torch_private
from fxshard.errors import InvariantError
from fxshard.runtime import gloo
from fxshard.sharding.sharded_module import units_under
from tests.ranks import two_ranks
from tests.state import processes
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


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64)


def sent_by_this_rank(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    numbers = [5 * torch.randn(dist.get_world_size() * n, generator=generator) for n in (1000, 3, 1, 0)]
    return [each.to(dtype) for each in (*numbers, numbers[0].view(2, -1).t().reshape(-1))]


def reduced(sent: list[Tensor], name: str, op: str = "sum") -> list[Tensor]:
    launched = torch.ops._c10d_functional.reduce_scatter_tensor_coalesced(sent, op, dist.get_world_size(), name)
    return [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in launched]


@two_ranks
def test_two_ranks_reduce_to_the_bits_of_gloos_own() -> None:
    world: Any = dist.group.WORLD
    for dtype in DTYPES:
        sent = sent_by_this_rank(dtype)
        filled = [tensor for tensor in sent if tensor.numel()]  # of an empty one torch's gloo makes nothing
        for op in ("sum", "avg") if dtype.is_floating_point else ("sum",):
            ours = [tensor for tensor in reduced(sent, gloo.reducing(world), op) if tensor.numel()]
            torch.testing.assert_close(ours, reduced(filled, world.group_name, op), rtol=0.0, atol=0.0)
    with pytest.raises(InvariantError, match="reduce to a sum or an average"):
        reduced([torch.ones(4)], gloo.reducing(world), "max")


def reduce_by_themselves() -> None:
    assert gloo.reducing(dist.group.WORLD) == ""
    pair = dist.new_subgroups(2)[0]
    assert gloo.reducing(pair) == f"{pair.group_name} by all_to_all"


@pytest.mark.multi_rank
def test_more_ranks_reduce_by_themselves_as_fsdp2() -> None:
    processes.run(4, reduce_by_themselves)


@two_ranks
def test_reductions_do_not_overtake_one_another() -> None:
    ops, name = torch.ops._c10d_functional, gloo.reducing(dist.group.WORLD)
    launched = [ops.reduce_scatter_tensor(torch.full((2 * n,), float(n)), "sum", 2, name) for n in range(1, 200)]
    for n, tensor in reversed(list(enumerate(launched, start=1))):
        assert torch.equal(ops.wait_tensor(tensor), torch.full((n,), 2.0 * n))


@two_ranks
def test_a_wait_that_failed_is_no_wait_that_is_done() -> None:
    group: Any = torch_private.process_group_of(gloo.reducing(dist.group.WORLD))
    out = torch.full((4,), -1.0)
    work = group.reduce_scatter_single(out, torch.ones(8), dist.ReduceScatterOptions())

    class Failing(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            raise RuntimeError("the other rank is gone")

    done, work._works = work._works, [Failing()]  # as where the connection breaks
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the other rank is gone"):
            work.wait()
    assert out.tolist() == [-1.0] * 4
    work._works = done
    assert work.wait()
    assert out.tolist() == [2.0] * 4


def train_over_two_lives() -> list[list[float]]:
    """Train over a group, destroy it, and go on over the next one of that name; return the losses."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: Any = fxshard.fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for _ in range(2):
            loss = model(torch.full((2, 4), 1.0 + rank)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(
            gloo.BACKEND, store=dist.PrefixStore("next", store), rank=rank, world_size=2, timeout=timedelta(seconds=60)
        )
        dist.barrier()
    return losses


@pytest.mark.multi_rank
def test_a_model_that_outlives_its_group_reduces_over_the_next_one() -> None:
    for losses in processes.run(2, train_over_two_lives):
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 4


@two_ranks
def test_units_reduce_so_and_a_group_of_their_own_does_too() -> None:
    module: Any = fxshard.fully_shard(nn.Linear(4, 4))
    (unit,) = units_under(module)
    assert unit.plan.reducing_group == f"{unit.plan.group} by all_to_all"
    assert not unit.plan.reduces_whole
    module.set_separate_reduce_scatter_group()
    assert unit.plan.reducing_group == f"{unit.groups.reduce.group_name} by all_to_all"  # type: ignore[union-attr]


def test_other_groups_reduce_by_themselves(mesh: DeviceMesh) -> None:
    assert gloo.reducing(mesh.get_group()) == ""
    assert gloo.reducing(None) == ""


@two_ranks
def test_tensors_of_other_devices_are_left_to_their_backend() -> None:
    assert gloo.reducing(dist.group.WORLD, "cpu")
    assert gloo.reducing(dist.group.WORLD, "cuda") == ""


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
