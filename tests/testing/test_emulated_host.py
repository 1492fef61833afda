"""`emulated_host`: copies of offloaded shards take as long as asked, one after the other, and change no bit."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import fxshard
from fxshard.errors import ConfigError
from fxshard.ir import ops
from fxshard.testing import emulated_host, emulated_link
from tests.numerics.harness import EAGER, compile_module, loss_on_ones
from tests.numerics.models import MLP

_wait = torch.ops._c10d_functional.wait_tensor


def test_copies_of_one_direction_follow_each_other_and_take_their_time() -> None:
    source = torch.arange(1000, dtype=torch.float32)
    with emulated_host(gigabytes_per_s=4e-4) as host:  # 10 ms
        began = time.perf_counter()
        copies = [ops.COPY_TO_DEVICE(source, "cpu", "to_device") for _ in range(2)]
        back = ops.COPY_TO_HOST(source, False, "to_host")
        for copy in (back, *copies):
            assert torch.equal(_wait(copy), source)
        seconds = time.perf_counter() - began
    first, second = (transfer.end_us - transfer.start_us for transfer in host.to_device.transfers)
    assert (first, second) == pytest.approx((1e4, 1e4), rel=0.01)
    assert 0.02 <= seconds < 0.03 + 0.05
    assert [transfer.bytes for transfer in host.transfers] == [4000, 4000, 4000]


def test_changes_no_bit_and_ends() -> None:
    found = []
    for speed in (None, 1e-2):
        torch.manual_seed(0)
        with emulated_link(2) as link:
            model = MLP()
            fxshard.fully_shard(model, mesh=link.mesh, offload_policy=CPUOffloadPolicy())
            compiled = compile_module(model, options=EAGER)
            if speed is None:
                loss_on_ones(compiled).backward()
            else:
                with emulated_host(gigabytes_per_s=speed) as host:
                    loss_on_ones(compiled).backward()
                assert {transfer.op for transfer in host.transfers} == {"to_device", "to_host"}
            found.append([p.grad.to_local().clone() for p in model.parameters()])  # type: ignore[union-attr]
        torch._dynamo.reset()
    assert all(map(torch.equal, *found))


def test_refuses_a_speed_that_means_nothing() -> None:
    with pytest.raises(ConfigError, match="gigabytes_per_s must be positive"), emulated_host(gigabytes_per_s=0):
        pass
