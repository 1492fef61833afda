"""Whole weights come out bit for bit, on the ranks that want them, in the memory that was promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxshard
from fxshard import torch_private
from fxshard.runtime.raw import as_bytes
from fxshard.state.local_shards import MIB, hold
from fxshard.state.weight_buckets import Buffers, Gathering, Weight, pack
from tests.numerics.harness import EAGER
from tests.peak_memory import PeakMemory
from tests.ranks import two_ranks
from tests.state.helpers import refused
from tests.state.states import assert_same, net, sharded

CPU = torch.device("cpu")


def expected(model: nn.Module) -> dict[str, Tensor]:
    """Return what an unsharded model would give out."""
    state = dict(model.state_dict())
    state.pop("head.weight", None)  # tied to the embedding
    return state


def copies(weights: Any) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in weights}


def wide() -> nn.Sequential:
    """Return a model with large and small, even and uneven, parameters of several dtypes."""
    torch.manual_seed(0)
    layers = [nn.Linear(512, 700), nn.Linear(300, 801), nn.Linear(6, 8), nn.Linear(400, 600).to(torch.bfloat16)]
    return nn.Sequential(*layers, nn.BatchNorm1d(3))


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None


@two_ranks
@pytest.mark.parametrize("ranks", [None, 0, [1], [0, 1]])
@pytest.mark.parametrize("bucket_mib", [512, 2, 0.001])
def test_gives_out_the_state_dict_of_the_unsharded_module(bucket_mib: float, ranks: Any) -> None:
    for model, plain in ((sharded(net()), net()), (fxshard.fully_shard(wide()), wide())):
        weights = fxshard.full_weights(model, bucket_mib=bucket_mib, ranks=ranks)
        wanted = expected(plain)
        assert weights.names == tuple(wanted)
        assert [(s, d) for s, d in zip(weights.shapes, weights.dtypes, strict=True)] == [
            (w.shape, w.dtype) for w in wanted.values()
        ]
        is_mine = ranks is None or dist.get_rank() in ([ranks] if isinstance(ranks, int) else ranks)
        assert_same(copies(weights), wanted if is_mine else {})


@two_ranks
@pytest.mark.parametrize("member", [True, False])
def test_a_process_group_says_who_gets_them(member: bool) -> None:
    group: Any = dist.new_group([1])
    model = sharded(net())
    assert (group == dist.GroupMember.NON_GROUP_MEMBER) == (dist.get_rank() == 0)
    group = group if member else dist.group.WORLD
    found = copies(fxshard.full_weights(model, ranks=group))
    assert_same(found, {} if member and dist.get_rank() == 0 else expected(net()))


SHARDED: dict[str, Any] = {
    "columns": lambda model: fxshard.fully_shard(model, shard_placement_fn=columns),
    "fsdp2": torch_fully_shard,
    "adopted": lambda model: fxshard.adopt(torch_fully_shard(model)),
    "replicas": lambda model: fxshard.fully_shard(
        model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    ),
    "offloaded": lambda model: fxshard.fully_shard(model, offload_policy=CPUOffloadPolicy()),
    "unsharded": lambda model: model,
    "compiled": lambda model: torch.compile(fxshard.fully_shard(model), backend="fxshard", options=EAGER),
}


@two_ranks
@pytest.mark.parametrize("how", list(SHARDED))
@pytest.mark.parametrize("ranks", [None, 1])
def test_however_it_is_sharded(how: str, ranks: int | None) -> None:
    model = SHARDED[how](wide())
    found = copies(fxshard.full_weights(model, bucket_mib=3, ranks=ranks))
    assert_same(found, expected(wide()) if ranks in (None, dist.get_rank()) else {})


@two_ranks
def test_one_line_form_before_and_after_its_first_call() -> None:
    plain = net().eval()
    model: Any = torch.compile(net().eval(), backend="fxshard", options=EAGER)
    assert_same(copies(fxshard.full_weights(model)), expected(plain))
    model(torch.arange(6))
    assert_same(copies(fxshard.full_weights(model, bucket_mib=0.001)), expected(plain))


@two_ranks
@pytest.mark.parametrize("ranks", [None, 0])
def test_tensor_parallel_parameters_are_whole(ranks: int | None) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    parallelize_module(model, mesh["tp"], {"blocks.0.0": ColwiseParallel(), "blocks.1.0": RowwiseParallel()})
    fxshard.fully_shard(model, mesh=mesh["dp"])
    found = copies(fxshard.full_weights(model, bucket_mib=0.001, ranks=ranks))
    assert_same(found, expected(net()) if ranks in (None, dist.get_rank()) else {})


@two_ranks
@pytest.mark.parametrize("ranks", [None, 0])
def test_casts_floats_to_the_dtype(ranks: int | None) -> None:
    found = copies(fxshard.full_weights(fxshard.fully_shard(wide()), dtype=torch.bfloat16, bucket_mib=1, ranks=ranks))
    cast = {name: w.to(torch.bfloat16) if w.is_floating_point() else w for name, w in wide().state_dict().items()}
    assert_same(found, cast if ranks in (None, dist.get_rank()) else {})


@two_ranks
def test_views_that_are_kept_stay_as_they_are() -> None:
    """The memory of a bucket is not used again while somebody has a view of it."""
    model = fxshard.fully_shard(wide())
    for bucket_mib in (512, 2, 0.001):
        assert_same(dict(fxshard.full_weights(model, bucket_mib=bucket_mib)), expected(wide()))
    last_ones = [list(bucket)[-1] for bucket in fxshard.full_weights(model, bucket_mib=2).buckets()]
    assert_same(dict(last_ones), {name: wide().state_dict()[name] for name, _ in last_ones})


@two_ranks
@pytest.mark.parametrize("ranks", [None, 0])
def test_takes_two_buckets_at_most(ranks: int | None) -> None:
    model = nn.Sequential(*(nn.Linear(256, 512) for _ in range(12)))  # 0.5 MiB each
    fxshard.fully_shard(model)
    pointers, read = set(), 0
    with PeakMemory() as memory:
        for name, weight in fxshard.full_weights(model, bucket_mib=2.5, ranks=ranks):
            pointers.add(weight.untyped_storage().data_ptr())
            read += 1
            del name
    assert read == (24 if ranks in (None, dist.get_rank()) else 0)
    assert len(pointers) == (3 if read else 0)
    small = 4096  # votes, and what ranks compare
    assert memory.peak <= 5 * MIB + small
    assert read or memory.peak <= small + 24 * 1024  # sends rows from where they lie; those of biases through a stage


@two_ranks
def test_packed_buckets_have_what_engines_ask_for() -> None:
    model, plain = fxshard.fully_shard(wide()), wide().state_dict()
    for bucket in fxshard.full_weights(model, bucket_mib=2).buckets():
        end = 0
        for name, shape, dtype, begin in zip(bucket.names, bucket.shapes, bucket.dtypes, bucket.offsets, strict=True):
            assert begin == -(-end // dtype.itemsize) * dtype.itemsize  # without a gap where dtypes are one
            end = begin + shape.numel() * dtype.itemsize
            assert torch.equal(bucket.buffer[begin:end].view(dtype).view(shape), plain[name])
        assert bucket.buffer.numel() == end


@two_ranks
def test_uses_what_is_unsharded_anyway() -> None:
    """Parameters that stay between microbatches, and those that may be read after a forward, are not gathered again."""
    world = dist.group.WORLD
    assert world is not None

    def collectives(model: nn.Module) -> int:
        before = torch_private.num_collectives(world, CPU)
        assert_same(copies(fxshard.full_weights(model, bucket_mib=1)), expected(model_before))
        return torch_private.num_collectives(world, CPU) - before

    model: Any = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 300))
    model_before = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 300))
    model_before.load_state_dict(model.state_dict())
    for layer in (*model, model):
        fxshard.fully_shard(layer)
    model.set_reshard_after_backward(False)
    compiled: Any = torch.compile(model, backend="fxshard", options=EAGER)
    x = torch.ones(2, 300)
    gathers = collectives(model)
    model.set_requires_gradient_sync(False)
    compiled(x).sum().backward()
    kept = collectives(model)
    model.set_requires_gradient_sync(True)
    model.reshard()
    assert kept <= gathers - 4
    model.set_reshard_after_forward(False, recurse=True)
    loss = model(x).sum() + model[0].weight.sum()
    assert collectives(model) <= gathers - 2
    loss.backward()


def test_one_process_needs_no_group() -> None:
    assert_same(copies(fxshard.full_weights(net(), bucket_mib=0.001)), expected(net()))
    assert_same(copies(fxshard.full_weights(nn.GELU())), {})


@two_ranks
def test_copies_to_another_device() -> None:
    weights = fxshard.full_weights(sharded(net()), device="meta", bucket_mib=0.001)
    assert {name: (w.device.type, w.shape) for name, w in weights} == {
        name: ("meta", w.shape) for name, w in expected(net()).items()
    }


@two_ranks
def test_an_accelerator_gathers_even_rows_straight_into_place() -> None:
    plain = wide()
    model = fxshard.fully_shard(wide())
    weights = [Weight(name, hold(value)) for name, value in model.state_dict(keep_vars=True).items()]
    (packing,), _ = pack(weights, 512)
    buffer = torch.empty(packing.nbytes, dtype=torch.uint8)
    gathering = Gathering(packing, buffer, CPU, (0, 1), gathers=True)
    gathering.start()
    gathering.finish()
    for begin, (name, value) in zip(packing.begins, plain.state_dict().items(), strict=True):
        assert torch.equal(buffer[begin : begin + value.nbytes], as_bytes(value)), name


def test_buffers_are_used_again_unless_somebody_has_a_view() -> None:
    buffers = Buffers([100, 64, 100, 300], 128, CPU)
    first = [buffers.next(nbytes).data_ptr() for nbytes in (100, 64, 100)]
    assert len(set(first)) == 3
    assert [buffers.next(64).data_ptr() for _ in range(3)] == first
    kept = buffers.next(100)[5:7]
    assert len({buffers.next(100).data_ptr() for _ in range(3)} - {kept.data_ptr() - 5}) == 3
    assert buffers.next(300).numel() == 300


# ---- refusals


@two_ranks
def test_refuses_on_every_rank_what_one_finds() -> None:
    model = sharded(net())
    for ranks in (2, [], [0, 5], "0", 0.5):
        assert "ranks must be None, some of the 2 ranks" in refused(fxshard.full_weights, model, ranks=ranks)
    assert "dtype must be a floating-point" in refused(fxshard.full_weights, model, dtype=torch.int8)
    assert "bucket_mib must be a positive" in refused(fxshard.full_weights, model, bucket_mib=0)
    assert "full_weights: the ranks do not hold the same state" in refused(
        fxshard.full_weights, model, bucket_mib=1 + dist.get_rank()
    )
    with torch.device("meta"):
        absent = nn.Linear(4, 4)
    assert "parameters on the meta device have no values" in refused(fxshard.full_weights, fxshard.fully_shard(absent))
