"""The pool of ranks: its results, its failures, and that it recovers from each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankPool, fresh_ranks, join_group, two_ranks

pytestmark = pytest.mark.multi_rank


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


def crash_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.write(2, b"what it says\n")
        os.abort()
    dist.barrier()


def report_rank(shift: int = 0) -> tuple[int, int, int]:
    return dist.get_rank() + shift, dist.get_world_size(), os.getpid()


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the sky fell")


def raise_everywhere() -> None:
    raise ValueError("the same sky fell")


def kill_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def sleep_forever() -> None:
    time.sleep(3600)


def launch_on_rank_zero_only() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1), async_op=True)


def leave_traces() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1234 + dist.get_rank())


def read_traces() -> tuple[torch.dtype, int]:
    return torch.get_default_dtype(), torch.initial_seed()


def destroy_group() -> None:
    dist.destroy_process_group()


def test_returns_the_result_of_each_rank(pool: RankPool) -> None:
    results = pool.run(report_rank, shift=10)
    assert [(rank, world_size) for rank, world_size, _ in results] == [(10, 2), (11, 2)]


def test_keeps_its_processes_between_runs(pool: RankPool) -> None:
    assert [pid for *_, pid in pool.run(report_rank)] == [pid for *_, pid in pool.run(report_rank)]


def test_ranks_can_communicate(pool: RankPool) -> None:
    assert pool.run(sum_of_ranks) == [1.0, 1.0]


def test_brings_the_traceback_of_the_rank_that_failed(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)failed on rank 1:.*in raise_on.*ValueError: the sky fell") as failure:
        pool.run(raise_on, rank=1)
    assert "rank 0" not in str(failure.value)


def test_shows_equal_tracebacks_once(pool: RankPool) -> None:
    with pytest.raises(RankError, match="failed on all ranks") as failure:
        pool.run(raise_everywhere)
    assert str(failure.value).count("ValueError: the same sky fell") == 1


def test_a_failed_body_costs_no_restart(pool: RankPool) -> None:
    before = pool.run(report_rank)
    with pytest.raises(RankError):
        pool.run(raise_everywhere)
    assert pool.run(report_rank) == before


def test_says_where_a_rank_crashed(pool: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank 1 died: killed by SIGABRT.*rank 1 was here:.*what it says.*in crash_on_rank_1"
    ):
        pool.run(crash_on_rank_1)


@pytest.mark.commands
def test_reports_a_dead_rank_and_recovers(pool: RankPool) -> None:
    before = pool.run(report_rank)
    with pytest.raises(RankError, match="rank 1 died: killed by SIGKILL"):
        pool.run(kill_rank_one)
    after = pool.run(report_rank)
    assert [rank for rank, *_ in after] == [0, 1]
    assert {pid for *_, pid in before}.isdisjoint(pid for *_, pid in after)


@pytest.mark.commands
def test_reports_a_timeout_with_the_stacks_and_recovers(pool: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"(?s)no answer within 2 s.*rank 0 was here:.*in sleep_forever.*rank 1 was here"
    ):
        pool.run(sleep_forever, timeout=2.0)
    assert pool.run(sum_of_ranks) == [1.0, 1.0]


@pytest.mark.commands
def test_reports_ranks_out_of_step_and_recovers(pool: RankPool) -> None:
    with pytest.raises(RankError, match="out of step"):
        pool.run(launch_on_rank_zero_only)
    assert pool.run(sum_of_ranks) == [1.0, 1.0]


@pytest.mark.commands
def test_reports_a_destroyed_group_and_recovers(pool: RankPool) -> None:
    with pytest.raises(RankError, match="run it with fresh_ranks"):
        pool.run(destroy_group)
    assert pool.run(sum_of_ranks) == [1.0, 1.0]


def test_restores_dtype_and_seed_between_runs(pool: RankPool) -> None:
    pool.run(leave_traces)
    assert pool.run(read_traces) == [(torch.float32, 0)] * 2


@two_ranks
@pytest.mark.parametrize("shift", [1, 2])
def test_a_decorated_test_runs_on_both_ranks_with_its_parameters(shift: int) -> None:
    assert (shift, dist.get_world_size()) in {(1, 2), (2, 2)}
    assert sum_of_ranks() == 1.0


@two_ranks(timeout=60)
def test_a_decorated_test_may_set_its_timeout() -> None:
    assert sum_of_ranks() == 1.0


@fresh_ranks
def test_fresh_ranks_may_destroy_their_group_and_join_another() -> None:
    dist.destroy_process_group()
    join_group("second")
    assert sum_of_ranks() == 1.0
