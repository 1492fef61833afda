"""The emulated link on a GPU: what it computes, how long it takes, and that it never stops the host."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fxshard.testing import EmulatedLink, emulated_link
from tests.gpu.link_checks import check_pace, gemm_slowdown
from tests.testing.link import OPS, TIMED_CUDA, W, group_name, small_numbers

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")]

Collective = Callable[[Tensor, Any], list[Tensor]]


@pytest.fixture(params=[{}, TIMED_CUDA], ids=["instant", "timed"])
def link(request: pytest.FixtureRequest) -> Iterator[EmulatedLink]:
    with emulated_link(W, device="cuda", **request.param) as link:
        yield link


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- data: as over the link of the CPU


def gathered(x: Tensor, op: Any) -> list[Tensor]:
    whole = torch.zeros(W * x.numel(), dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(whole, x)
    return [whole]


def gathered_in_place(x: Tensor, op: Any) -> list[Tensor]:
    whole = torch.zeros(W * x.numel(), dtype=x.dtype, device=x.device)
    whole[: x.numel()] = x
    dist.all_gather_into_tensor(whole, whole[: x.numel()])
    return [whole]


def gathered_as_list(x: Tensor, op: Any) -> list[Tensor]:
    pieces = [torch.zeros_like(x) for _ in range(W)]
    dist.all_gather(pieces, x)
    return pieces


def scattered(x: Tensor, op: Any) -> list[Tensor]:
    whole = torch.cat([x + rank for rank in range(W)])
    own = torch.zeros_like(x)
    dist.reduce_scatter_tensor(own, whole, op=op)
    return [own]


def scattered_as_list(x: Tensor, op: Any) -> list[Tensor]:
    own = torch.zeros_like(x)
    dist.reduce_scatter(own, [x + rank for rank in range(W)], op=op)
    return [own]


def reduced(x: Tensor, op: Any) -> list[Tensor]:
    value = x.clone()
    dist.all_reduce(value, op=op)
    return [value]


def shuffled(x: Tensor, op: Any) -> list[Tensor]:
    source, out = torch.cat([x + rank for rank in range(W)]), torch.zeros(W * x.numel(), dtype=x.dtype, device=x.device)
    dist.all_to_all_single(out, source)
    return [out]


def unaligned(x: Tensor, op: Any) -> list[Tensor]:
    """Everything one element off."""
    padded = torch.cat([x[:1], x]) if x.numel() else x
    whole = torch.zeros(W * x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
    dist.all_gather_into_tensor(whole, padded[1:] if x.numel() else x)
    own = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
    dist.reduce_scatter_tensor(own, whole, op=op)
    return [whole, own]


COLLECTIVES = [
    gathered,
    gathered_in_place,
    gathered_as_list,
    scattered,
    scattered_as_list,
    reduced,
    shuffled,
    unaligned,
]
SIZES = (0, 1, 3, 16, 1000, 8192 * 16, 8192 * 16 * 3 + 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8)


def everything(collective: Collective, device: Any) -> list[Tensor]:
    found = []
    for dtype in DTYPES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist._make_nccl_premul_sum(0.5)):
            if op == dist.ReduceOp.PREMUL_SUM and not dtype.is_floating_point:
                continue
            for size in SIZES:
                found += [tensor.cpu() for tensor in collective(small_numbers(size, dtype, device), op)]
    return found


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda collective: collective.__name__)
def test_values_are_those_of_the_link_of_the_cpu(collective: Collective) -> None:
    with emulated_link(W):
        expected = everything(collective, "cpu")
    for options in ({}, TIMED_CUDA):
        with emulated_link(W, device="cuda", **options):
            actual = everything(collective, "cuda")
        for found, wanted in zip(actual, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_strided_tensors_products_and_the_rest_work_too(link: EmulatedLink, device: torch.device) -> None:
    x = small_numbers(12, torch.float32, device)
    strided = x.view(3, 4).t()
    out = torch.zeros(W * 12, device=device)
    dist.all_gather_into_tensor(out, strided.contiguous())
    assert out.equal(strided.reshape(-1).repeat(W))
    product = x.clone()
    dist.all_reduce(product, op=dist.ReduceOp.PRODUCT)
    torch.testing.assert_close(product, x**W)
    turned = torch.zeros(3, 4, device=device).t()
    dist.scatter(turned, [strided] * W, src=0)
    assert turned.equal(strided)
    dist.broadcast(x, src=0)
    dist.barrier()
    objects: list[Any] = [None] * W
    dist.all_gather_object(objects, {"rank": 0})
    assert objects == [{"rank": 0}] * W


def test_a_tensor_beyond_2_to_the_31_bytes_arrives_whole(device: torch.device) -> None:
    shard = torch.arange(600 * 2**20, device=device, dtype=torch.int32).to(torch.uint8)
    with emulated_link(W, device="cuda", gigabytes_per_s=400.0):
        whole = torch.zeros(W * shard.numel(), dtype=torch.uint8, device=device)
        dist.all_gather_into_tensor(whole, shard)
        assert all(torch.equal(piece, shard) for piece in whole.chunk(W))
        own = torch.zeros_like(shard)
        dist.reduce_scatter_tensor(own, whole, op=dist.ReduceOp.AVG)
        assert own.equal(shard)


def test_functional_collectives_compute_the_same(link: EmulatedLink, device: torch.device) -> None:
    x, name, wait = small_numbers(W, torch.float32, device), group_name(), OPS.wait_tensor
    assert wait(OPS.all_gather_into_tensor(x, W, name)).equal(x.repeat(W))
    assert wait(OPS.reduce_scatter_tensor(x, "sum", W, name)).equal(x[:1] * W)
    assert wait(OPS.all_reduce(x, "avg", name)).equal(x)
    whole, own = torch.zeros(W * W, device=device), torch.zeros(1, device=device)
    wait(OPS.all_gather_into_tensor_out(x, W, name, out=whole))
    wait(OPS.reduce_scatter_tensor_out(x, "sum", W, name, out=own))
    assert whole.equal(x.repeat(W))
    assert own.equal(x[:1] * W)


def test_coalesced_collectives_are_one_transfer_with_one_latency(device: torch.device) -> None:
    with emulated_link(W, device="cuda", latency_us=2000.0) as link:
        x, y, name = (
            small_numbers(W, torch.float32, device),
            small_numbers(8192 * W, torch.float32, device),
            group_name(),
        )
        found = [OPS.wait_tensor(t) for t in OPS.all_gather_into_tensor_coalesced([x, y], W, name)]
        assert all(t.equal(source.repeat(W)) for t, source in zip(found, (x, y), strict=True))
        link.clear()
        for t in OPS.all_gather_into_tensor_coalesced([x, y], W, name):
            OPS.wait_tensor(t)
        (transfer,) = link.transfers
    assert transfer.bytes == W * (x.nbytes + y.nbytes)
    assert 2000 <= transfer.end_us - transfer.start_us < 3000


# ---- time


def test_fifty_slow_transfers_are_launched_at_once_and_arrive_in_order(device: torch.device) -> None:
    with emulated_link(W, device="cuda", latency_us=10_000.0) as link:
        whole, shard = torch.zeros(W * 1024, device=device), torch.zeros(1024, device=device)
        dist.all_gather_into_tensor(whole, shard)
        torch.cuda.synchronize()
        link.clear()
        began = time.perf_counter()
        works = [dist.all_gather_into_tensor(whole, shard, async_op=True) for _ in range(50)]
        for work in works:
            assert work is not None
            work.wait()
        launched = time.perf_counter() - began
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - began
    assert launched < 0.05
    assert 0.5 <= elapsed < 0.6
    assert len(link.transfers) == 50
    assert all(t.start_us >= before.end_us - 1 for before, t in zip(link.transfers, link.transfers[1:], strict=False))
    assert all(t.end_us - t.start_us >= 9_999 for t in link.transfers)


def test_launching_and_waiting_synchronise_nothing(link: EmulatedLink, device: torch.device) -> None:
    x, name = small_numbers(4096, torch.float32, device), group_name()
    works = []
    with no_synchronisation():
        for op in ("sum", "avg"):
            OPS.wait_tensor(OPS.reduce_scatter_tensor(x, op, W, name))
        works.append(dist.all_gather_into_tensor(torch.empty(W * 4096, device=device), x, async_op=True))
        dist.all_reduce(x)
        dist.barrier()
        for work in works:
            assert work is not None
            work.wait()


def test_waiting_orders_what_reads_and_what_writes_next(device: torch.device) -> None:
    with emulated_link(W, device="cuda", latency_us=5000.0):
        x = torch.ones(1 << 20, device=device)
        whole = torch.zeros(W << 20, device=device)
        for step in range(5):
            x.fill_(step)  # before the launch, in the stream of the caller
            work = dist.all_gather_into_tensor(whole, x, async_op=True)
            assert work is not None
            work.wait()
            assert whole.min().item() == whole.max().item() == step


def test_other_streams_run_beside_a_transfer(device: torch.device) -> None:
    with emulated_link(W, device="cuda", latency_us=50_000.0):
        x = torch.ones(1024, device=device)
        x.mul_(2)  # loads the kernel, which may wait for those that run
        dist.barrier()
        torch.cuda.synchronize()
        done, began = torch.cuda.Event(), time.perf_counter()
        work = dist.barrier(async_op=True)
        x.mul_(2)
        done.record()
        done.synchronize()
        computed = time.perf_counter() - began
        assert work is not None
        assert not work.is_completed()
        work.wait()
        torch.cuda.synchronize()
    assert computed < 0.04
    assert time.perf_counter() - began >= 0.05


def test_a_live_link_changes_its_speed_and_its_thread_blocks(device: torch.device) -> None:
    with emulated_link(W, device="cuda") as link:
        whole, shard = torch.zeros(W << 18, device=device), torch.ones(1 << 18, device=device)
        dist.all_gather_into_tensor(whole, shard)  # what is loaded at its first use is loaded now
        link.clear()
        speeds: list[dict[str, Any]] = [
            {},
            {"latency_us": 20_000.0, "ctas": 3},
            {"gigabytes_per_s": 1.0, "ctas": 24},
            {},
        ]
        for speed in speeds:
            link.set_speed(**speed)
            whole.zero_()
            dist.all_gather_into_tensor(whole, shard)
            assert whole.min().item() == 1
        instant, late, slow, again = (t.end_us - t.start_us for t in link.transfers)
    assert late >= 19_999
    assert slow >= 4 * 2**20 * 0.75 / 1e3 - 1
    assert max(instant, again) < 2000


@pytest.mark.parametrize("gigabytes_per_s", [25.0, 370.0])
def test_the_pace_is_what_was_asked_idle_and_beside_matrix_products(gigabytes_per_s: float) -> None:
    with emulated_link(8, device="cuda") as link:
        checks = check_pace(link, gigabytes_per_s)
    for check in checks:
        print(check)
    assert [check for check in checks if abs(check.error) > 0.03] == []
    idle = [check for check in checks if not check.is_busy]
    assert [c for c in idle if abs(c.measured_us - c.asked_us) > 0.03 * c.asked_us + 10.0] == []  # and the launch


@pytest.mark.parametrize(("gigabytes_per_s", "ctas"), [(100.0, 8), (100.0, 16), (370.0, 16)])
def test_a_reduction_reads_as_fast_as_was_asked(device: torch.device, gigabytes_per_s: float, ctas: int) -> None:
    with emulated_link(8, device="cuda", gigabytes_per_s=gigabytes_per_s, ctas=ctas) as link:
        whole, shard = torch.ones(1 << 26, device=device), torch.empty(1 << 23, device=device)
        for _ in range(4):  # the first loads the kernel
            dist.reduce_scatter_tensor(shard, whole)
        took_us = sorted(transfer.end_us - transfer.start_us for transfer in link.transfers[1:])[1]
    asked_us = whole.nbytes * 7 / 8 / gigabytes_per_s / 1e3
    print(f"{gigabytes_per_s:g} GB/s, {ctas} CTAs: {took_us:.0f} us, asked {asked_us:.0f}")
    assert took_us == pytest.approx(asked_us, rel=0.03, abs=10)


def test_a_slowdown_beside_the_link_is_measured() -> None:
    with emulated_link(8, device="cuda") as link:
        found = gemm_slowdown(link, 16, products=20)
    print(found)
    assert found.ctas == 16
    assert 0.9 < found.ratio < 3.0


# ---- memory


def test_inputs_are_freed_by_waiting_and_not_before(device: torch.device) -> None:
    with emulated_link(W, device="cuda", latency_us=1000.0):
        x = torch.ones(1024, device=device)
        alive = weakref.ref(x)
        work = dist.all_gather_into_tensor(torch.empty(W * 1024, device=device), x, async_op=True)
        del x
        gc.collect()
        assert work is not None
        assert alive() is not None
        work.wait()
        assert alive() is None


def test_a_transfer_that_nobody_waits_for_keeps_its_memory(device: torch.device) -> None:
    with emulated_link(W, device="cuda", latency_us=20_000.0):
        whole, x = torch.zeros(W << 20, device=device), torch.ones(1 << 20, device=device)
        work = dist.all_gather_into_tensor(whole, x, async_op=True)
        del x, work
        gc.collect()
        torch.full((1 << 20,), 7.0, device=device)  # would take the memory of x
        torch.cuda.synchronize()
        assert whole.min().item() == whole.max().item() == 1
