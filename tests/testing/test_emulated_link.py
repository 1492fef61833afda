"""The emulated link: what it computes, how long it takes, and its changes of speed."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxshard.errors import ConfigError
from fxshard.testing import EmulatedLink, Speed, Transfer, emulated_link
from tests.testing.link import OPS, TIMED, W, group_name, ramp

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # names that torch 2.11 has


@pytest.fixture(params=[{}, TIMED], ids=["instant", "timed"])
def link(request: pytest.FixtureRequest) -> Iterator[EmulatedLink]:
    """A link of each engine."""
    with emulated_link(W, **request.param) as link:
        yield link


@pytest.fixture
def name(link: EmulatedLink) -> Any:
    """Of the default group."""
    return group_name()


# ---- data


def test_all_gather_repeats_the_shard(link: EmulatedLink) -> None:
    x, whole, pieces = ramp(2, 3), torch.empty(2 * W, 3), [torch.empty(2, 3) for _ in range(W)]
    dist.all_gather_into_tensor(whole, x)
    dist.all_gather(pieces, x)
    torch.testing.assert_close(whole, x.repeat(W, 1), rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        (dist.ReduceOp.SUM, W),
        (dist.ReduceOp.AVG, 1),
        (dist.ReduceOp.MIN, 1),
        (dist.ReduceOp.MAX, 1),
        (dist._make_nccl_premul_sum(0.5), W * 0.5),
    ],
    ids=["sum", "avg", "min", "max", "premul_sum"],
)
def test_reductions_combine_equal_values(link: EmulatedLink, op: Any, factor: float) -> None:
    x, own, from_list, reduced, rooted = ramp(2 * W, 3), torch.empty(2, 3), torch.empty(2, 3), ramp(5), ramp(5)
    dist.reduce_scatter_tensor(own, x, op=op)
    dist.reduce_scatter(from_list, list(x.chunk(W)), op=op)
    dist.all_reduce(reduced, op=op)
    dist.reduce(rooted, 0, op=op)
    for actual, value in ((own, x[:2]), (from_list, x[:2]), (reduced, ramp(5)), (rooted, ramp(5))):
        torch.testing.assert_close(actual, value * factor, rtol=0, atol=0)


def test_nothing_can_be_gathered_and_scattered(link: EmulatedLink) -> None:
    for outputs, inputs in ((0, 0), (3, 3 * W)):
        own = torch.zeros(outputs)
        dist.reduce_scatter_tensor(own, torch.ones(inputs))
        assert own.tolist() == [W] * outputs
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))


def test_a_product_is_a_power(link: EmulatedLink) -> None:
    x = ramp(3)
    dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)
    torch.testing.assert_close(x, ramp(3) ** W)


def test_broadcast_scatter_gather_and_objects_move_what_this_rank_holds(link: EmulatedLink) -> None:
    x, out, pieces = ramp(3), torch.empty(3), [torch.empty(3) for _ in range(W)]
    dist.broadcast(x, src=0)
    dist.scatter(out, [x + rank for rank in range(W)], src=0)
    dist.gather(x, pieces, dst=0)
    objects: list[Any] = [None] * W
    dist.all_gather_object(objects, {"rank": 0})
    dist.barrier()
    torch.testing.assert_close(torch.stack([x, out, *pieces]), ramp(3).expand(W + 2, 3), rtol=0, atol=0)
    assert objects == [{"rank": 0}] * W


def test_all_to_all_receives_from_every_peer_what_this_rank_keeps(link: EmulatedLink) -> None:
    x, single, pieces = ramp(2 * W), torch.empty(2 * W), [torch.empty(2) for _ in range(W)]
    dist.all_to_all_single(single, x)
    dist.all_to_all(pieces, list(x.chunk(W)))
    torch.testing.assert_close(single, x[:2].repeat(W), rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(pieces), single, rtol=0, atol=0)


def test_an_uneven_all_to_all_receives_what_this_rank_sends() -> None:
    with emulated_link(4, gigabytes_per_s=1.0) as link:
        out = torch.empty(7)
        dist.all_to_all_single(out, ramp(3), [0, 3, 3, 1], [0, 1, 1, 1])
        assert out.equal(ramp(3).repeat(3)[:7])
        assert link.transfers[-1].bytes == 7 * 4 * 4 // 3, "a link takes what comes from others, three of four ranks"


def test_functional_collectives_compute_the_same(link: EmulatedLink, name: Any) -> None:
    x, wait = ramp(W), OPS.wait_tensor
    assert wait(OPS.all_gather_into_tensor(x, W, name)).equal(x.repeat(W))
    assert wait(OPS.reduce_scatter_tensor(x, "sum", W, name)).equal(x[:1] * W)
    assert wait(OPS.all_reduce(x, "avg", name)).equal(x)
    assert wait(OPS.all_to_all_single(x, [1] * W, [1] * W, name)).equal(x[:1].repeat(W))
    assert wait(OPS.broadcast(x, 0, name)).equal(x)


def test_coalesced_functional_collectives_are_one_transfer(link: EmulatedLink, name: Any) -> None:
    x, y = ramp(W), ramp(2 * W)
    gathered = [OPS.wait_tensor(t) for t in OPS.all_gather_into_tensor_coalesced([x, y], W, name)]
    scattered = [OPS.wait_tensor(t) for t in OPS.reduce_scatter_tensor_coalesced([x, y], "sum", W, name)]
    assert [t.tolist() for t in gathered] == [x.repeat(W).tolist(), y.repeat(W).tolist()]
    assert [t.tolist() for t in scattered] == [(x[:1] * W).tolist(), (y[:2] * W).tolist()]
    assert [(t.op, t.bytes) for t in link.transfers] == [("all_gather", 3 * W * W * 4), ("reduce_scatter", 3 * W * 4)]


def test_the_most_that_was_gathered_at_once_is_counted(link: EmulatedLink, name: Any) -> None:
    x = ramp(W)
    for kept in (False, True):
        link.clear()
        first = OPS.wait_tensor(OPS.all_gather_into_tensor(x, W, name))
        if not kept:
            del first
        assert len([OPS.wait_tensor(t) for t in OPS.all_gather_into_tensor_coalesced([x, x], W, name)]) == 2
        assert link.gathered_peak_bytes == (2 + kept) * W * W * 4


def test_out_variants_write_where_they_are_told(link: EmulatedLink, name: Any) -> None:
    x, whole, own = ramp(W), torch.empty(W * W), torch.empty(1)
    OPS.wait_tensor(OPS.all_gather_into_tensor_out(x, W, name, out=whole))
    OPS.wait_tensor(OPS.reduce_scatter_tensor_out(x, "sum", W, name, out=own))
    assert whole.equal(x.repeat(W))
    assert own.equal(x[:1] * W)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_coalescing_manager_waits_for_all_it_coalesced(link: EmulatedLink, device: torch.device | None) -> None:
    shards, wholes = [ramp(2), ramp(3)], [torch.empty(2 * W), torch.empty(3 * W)]
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        for whole, shard in zip(wholes, shards, strict=True):
            dist.all_gather_into_tensor(whole, shard)
    manager.wait()
    assert [whole.tolist() for whole in wholes] == [shard.repeat(W).tolist() for shard in shards]
    assert [t.bytes for t in link.transfers] == [5 * W * 4]


def test_inference_tensors_and_parameters_can_be_written(link: EmulatedLink) -> None:
    with torch.inference_mode():
        whole = torch.empty(2 * W)
        dist.all_gather_into_tensor(whole, ramp(2))
    weight = torch.nn.Parameter(ramp(2))
    dist.all_reduce(weight)
    assert whole.equal(ramp(2).repeat(W))
    assert weight.equal(ramp(2) * W)


def test_a_future_has_the_outputs(link: EmulatedLink) -> None:
    own = torch.empty(1)
    work = dist.reduce_scatter_tensor(own, ramp(W), async_op=True)
    assert work is not None
    (value,) = work.get_future().wait()
    assert value is own
    assert own.equal(torch.full((1,), float(W)))


def test_a_group_of_some_ranks_shares_the_link_and_has_their_number(link: EmulatedLink) -> None:
    pair: Any = dist.new_group([0, 2])
    x = ramp(2)
    dist.all_reduce(x, group=pair)
    assert x.equal(ramp(2) * 2)
    assert [t.op for t in link.transfers] == ["all_reduce"]


def test_one_rank_alone_is_a_group_too() -> None:
    with emulated_link(1, **TIMED):
        whole = torch.empty(3)
        dist.all_gather_into_tensor(whole, ramp(3))
    assert whole.equal(ramp(3))


# ---- what fails


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: dist.send(ramp(1), 1), "send"),
        (lambda: dist.recv(ramp(1), 1), "recv"),
        (lambda: dist.scatter(ramp(1), src=1), "scatter from another rank"),
        (lambda: dist.all_reduce(torch.ones(1, dtype=torch.int64), op=dist.ReduceOp.BXOR), "reducing with BXOR"),
        (lambda: dist.all_gather_into_tensor(*(torch.empty(n, device="meta") for n in (W, 1))), "tensors on meta"),
    ],
    ids=["send", "recv", "scatter", "bitwise", "meta"],
)
def test_what_is_not_emulated_is_refused_by_name(link: EmulatedLink, call: Callable[[], Any], what: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"emulated_link: .*{what}|{what}.* is not implemented"):
        call()


def test_a_failed_transfer_raises_where_it_is_waited_for_and_leaves_the_link_working() -> None:
    with emulated_link(W, **TIMED) as link:
        work = dist.all_gather_into_tensor(torch.empty(7), torch.empty(3), async_op=True)
        assert work is not None
        with pytest.raises(RuntimeError, match="invalid for input of size 7"):
            work.wait()
        with pytest.raises(RuntimeError, match="invalid for input of size 7"):
            dist.all_gather_into_tensor(torch.empty(7), torch.empty(3), async_op=True).get_future().wait()
        dist.barrier()
        assert [t.op for t in link.transfers] == ["barrier"]


def test_an_instant_transfer_that_fails_raises_at_once() -> None:
    with emulated_link(W), pytest.raises(RuntimeError, match="invalid for input of size 7"):
        dist.all_gather_into_tensor(torch.empty(7), torch.empty(3), async_op=True)


def test_groups_whose_ranks_are_on_several_machines_have_a_link_of_their_own() -> None:
    between = Speed(gigabytes_per_s=1.0, latency_us=500.0)
    with emulated_link(4, **TIMED, ranks_per_machine=2, between_machines=between) as link:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        works = [
            dist.all_reduce(torch.ones(25_000), group=mesh[name].get_group(), async_op=True)
            for name in ("shard", "replicate")
        ]
        works.append(dist.all_reduce(torch.ones(25_000), async_op=True))  # all ranks
        for work in works:
            work.wait()
        within, replicas, everybody = link.transfers
        assert [t.expected_us for t in link.transfers] == pytest.approx([30.0, 600.0, 650.0])
        assert within.start_us < replicas.end_us, "one link waited for the other"
        assert everybody.start_us >= replicas.end_us
        link.clear()
        assert link.transfers == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size must be a positive int, got 0"),
        ({"world_size": 2.0}, "world_size must be a positive int"),
        ({"gigabytes_per_s": 0.0}, "gigabytes_per_s must be positive"),
        ({"gigabytes_per_s": math.nan}, "gigabytes_per_s must be positive"),
        ({"latency_us": "3"}, "latency_us must be a number"),
        ({"latency_us": -1.0}, "latency_us must be finite and not negative"),
        ({"latency_us": math.inf}, "latency_us must be finite and not negative"),
        ({"ranks_per_machine": 2}, "ranks_per_machine and between_machines belong together"),
        ({"between_machines": Speed()}, "ranks_per_machine and between_machines belong together"),
        ({"between_machines": Speed(), "ranks_per_machine": 3}, f"must divide world_size={W}, got 3"),
        ({"between_machines": Speed(), "ranks_per_machine": True}, f"must divide world_size={W}, got True"),
    ],
)
def test_meaningless_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), emulated_link(**{"world_size": W, **arguments}):
        pass
    assert not dist.is_initialized()


def test_another_device_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="device='meta' is not implemented"):
        emulated_link(W, device="meta").__enter__()
    with emulated_link(W, device=torch.device("cpu")) as link:
        assert link.mesh.device_type == "cpu"


# ---- time


def test_transfers_follow_one_another_and_take_latency_plus_bytes_over_bandwidth() -> None:
    with emulated_link(W, gigabytes_per_s=0.01, latency_us=10_000) as link:
        began = time.perf_counter()
        works = [
            dist.all_gather_into_tensor(torch.empty(100_000), torch.empty(25_000), async_op=True),
            dist.reduce_scatter_tensor(torch.empty(25_000), torch.empty(100_000), async_op=True),
            dist.all_reduce(torch.empty(50_000), async_op=True),
        ]
        for work in works:
            assert work is not None
            work.wait()
        elapsed_us = (time.perf_counter() - began) * 1e6
    taken_us = 10_000 + 400_000 * (W - 1) / W / 0.01 * 1e-3  # of each: all_reduce sends its bytes twice
    assert [(t.op, t.bytes) for t in link.transfers] == [
        ("all_gather", 400_000),
        ("reduce_scatter", 400_000),
        ("all_reduce", 200_000),
    ]
    assert all(t.end_us - t.start_us >= taken_us - 1 for t in link.transfers)
    assert all(t.start_us >= before.end_us for before, t in zip(link.transfers, link.transfers[1:], strict=False))
    assert elapsed_us >= 3 * taken_us - 1


def test_waking_up_late_does_not_delay_the_next_transfer() -> None:
    with emulated_link(W, latency_us=100_000) as link:
        works = [dist.barrier(async_op=True) for _ in range(3)]  # all launched while the first is under way
        time.sleep(0.15)  # beyond the end of the first
        for work in works:
            assert work is not None
            work.wait()
    assert [t.start_us for t in link.transfers[1:]] == [t.end_us for t in link.transfers[:-1]]


def test_a_transfer_that_nothing_preceded_starts_when_it_is_launched() -> None:
    with emulated_link(W, latency_us=1000) as link:
        dist.barrier()
        time.sleep(0.02)
        dist.barrier()
    first, second = link.transfers
    assert second.start_us - first.end_us >= 15_000


def test_a_transfer_runs_while_this_thread_computes() -> None:
    with emulated_link(W, latency_us=300_000):
        began = time.perf_counter()
        work = dist.barrier(async_op=True)
        assert work is not None
        assert not work.is_completed()
        time.sleep(0.25)  # stands for computation
        work.wait()
        assert work.is_completed()
        assert 0.3 <= time.perf_counter() - began < 0.5


def test_only_waiting_takes_time() -> None:
    with emulated_link(W, latency_us=200_000):
        name, began = group_name(), time.perf_counter()
        whole = OPS.all_gather_into_tensor(ramp(2), W, name)
        launched = time.perf_counter() - began
        OPS.wait_tensor(whole)
        assert launched < 0.15
        assert time.perf_counter() - began >= 0.2


def test_what_a_transfer_reads_lives_until_it_has_been_waited_for() -> None:
    with emulated_link(W, latency_us=100_000):
        x = ramp(2)
        alive = weakref.ref(x)
        work = dist.all_gather_into_tensor(torch.empty(2 * W), x, async_op=True)
        del x
        gc.collect()
        time.sleep(0.02)  # it is copied now, but has not arrived
        assert work is not None
        assert alive() is not None
        work.wait()
        assert alive() is None


def test_transfers_can_be_forgotten() -> None:
    with emulated_link(W) as link:
        assert link.transfers == []
        dist.barrier()
        assert [type(t) for t in link.transfers] == [Transfer]
        link.clear()
        assert link.transfers == []


# ---- coming and going


def test_the_default_group_is_rank_0_and_gone_at_the_end() -> None:
    for world_size, options in ((2, dict[str, Any]()), (8, TIMED), (2, {})):
        with emulated_link(world_size, **options) as link:
            assert (dist.get_rank(), dist.get_world_size(), link.mesh.size()) == (0, world_size, world_size)
            assert dist.get_backend() == "emulated"
            x = ramp(1)
            dist.all_reduce(x)
            assert x.item() == world_size
        assert not dist.is_initialized()


def test_an_exception_leaves_no_group_behind() -> None:
    with pytest.raises(KeyError), emulated_link(W):
        raise KeyError("from the body")
    assert not dist.is_initialized()
    with emulated_link(W):
        assert dist.is_initialized()


def test_a_body_may_destroy_the_group_itself() -> None:
    with emulated_link(W):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_a_second_default_group_is_refused_and_the_first_one_left_alone() -> None:
    with emulated_link(W):
        with pytest.raises(ConfigError, match=r"a default process group already\. Call .*destroy_process_group"):
            emulated_link(2).__enter__()
        assert dist.get_world_size() == W


def test_real_groups_work_during_and_after() -> None:
    with emulated_link(W):
        alone = dist.new_group([0], backend="gloo")
        check_out_variants(alone)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "gloo"
        check_out_variants(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def check_out_variants(group: Any) -> None:
    """On a group of this rank alone."""
    whole, own = torch.empty(3), torch.empty(3)
    OPS.wait_tensor(OPS.all_gather_into_tensor_out(ramp(3), 1, group.group_name, out=whole))
    OPS.wait_tensor(OPS.reduce_scatter_tensor_out(ramp(3), "sum", 1, group.group_name, out=own))
    assert whole.equal(ramp(3))
    assert own.equal(ramp(3))


def test_the_operators_of_torch_are_its_own_again_at_the_end() -> None:
    with emulated_link(W):
        pass
    for name in ("all_gather_into_tensor_out", "reduce_scatter_tensor_out"):
        for key in ("CPU", "CUDA"):
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"_c10d_functional::{name}", key)


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
