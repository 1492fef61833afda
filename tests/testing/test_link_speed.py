"""A live link changes its speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxshard.errors import ConfigError
from fxshard.testing import emulated_link
from tests.testing.link import TIMED, W, ramp

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # names that torch 2.11 has


def seconds_of(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_a_live_link_becomes_slow_and_instant_again() -> None:
    with emulated_link(W) as link:
        whole = torch.empty(2 * W)
        for latency_us in (0, 100_000, 0):
            link.set_speed(latency_us=latency_us)
            whole.zero_()
            seconds = seconds_of(lambda: dist.all_gather_into_tensor(whole, ramp(2)))
            assert whole.equal(ramp(2).repeat(W))
            assert (seconds >= 0.1) is (latency_us > 0)
    assert [t.end_us - t.start_us >= 99_999 for t in link.transfers] == [False, True, False]
    assert all(t.start_us >= before.end_us for before, t in zip(link.transfers, link.transfers[1:], strict=False))


def test_what_is_under_way_keeps_its_speed_and_arrives_first() -> None:
    with emulated_link(W, latency_us=100_000) as link:
        work = dist.barrier(async_op=True)
        assert work is not None
        link.set_speed(latency_us=50_000)
        assert work.is_completed()
        dist.barrier()
    slow, faster = (t.end_us - t.start_us for t in link.transfers)
    assert slow >= 99_999
    assert 49_999 <= faster < 99_999


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gigabytes_per_s": -1}, "gigabytes_per_s must be positive"),
        ({"latency_us": None}, "latency_us must be a number"),
        ({"ctas": 16}, "ctas is for device='cuda', and the device of this link is 'cpu'"),
    ],
)
def test_a_meaningless_speed_is_refused_and_the_old_one_kept(arguments: dict[str, Any], message: str) -> None:
    with emulated_link(W, latency_us=30_000) as link:
        with pytest.raises(ConfigError, match=message):
            link.set_speed(**arguments)
        assert seconds_of(dist.barrier) >= 0.03


def test_a_set_speed_after_a_failed_transfer_works() -> None:
    with emulated_link(W, **TIMED) as link:
        work = dist.all_gather_into_tensor(torch.empty(7), torch.empty(3), async_op=True)
        link.set_speed()
        dist.barrier()
        assert work is not None
        with pytest.raises(RuntimeError, match="invalid for input of size 7"):
            work.wait()
