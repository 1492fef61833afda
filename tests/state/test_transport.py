"""Bytes arrive where they belong, through buckets of any size, and take no more memory than they may."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fxshard
from fxshard.runtime.parameters import local_of
from fxshard.runtime.raw import as_bytes
from fxshard.state import transport
from fxshard.state.local_shards import MIB, LocalShard, gather_all
from fxshard.state.rounds import STRAIGHT_BYTES, Chunk, Item, Kind, Round, rounds_of
from fxshard.state.transport import Wire, part
from tests.numerics.harness import world_mesh
from tests.pairwise import slow
from tests.peak_memory import PeakMemory
from tests.ranks import two_ranks
from tests.state.helpers import on_first
from tests.state.states import adamw, assert_same, net, sharded, trained

CPU = torch.device("cpu")


def item_of(tensor: Tensor, world_size: int, straight: bool) -> Item:
    rows = -(-tensor.shape[0] // world_size)
    row_bytes = tensor[:1].numel() * tensor.element_size()
    return Item(tensor.numel() * tensor.element_size(), rows * row_bytes, straight)


def random_tensors(seed: int) -> list[Tensor]:
    """Return tensors of all sizes and dtypes, some with fewer rows than ranks, some empty."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64]
    found = []
    for _ in range(30):
        shape = (chance.choice([0, 1, 2, 3, 7, 64, 999]), chance.choice([1, 3, 60, 500]))
        found.append(torch.randn(shape, generator=generator).to(chance.choice(dtypes)))
    return found


# ---- the plan


def test_small_items_share_a_round_and_large_ones_go_alone() -> None:
    large = Item(4 * STRAIGHT_BYTES, 2 * STRAIGHT_BYTES, True)
    items = [Item(100, 52, True), large, Item(0, 0, False), Item(60, 60, True), large._replace(straight=False)]
    region = STRAIGHT_BYTES + 32
    assert rounds_of(items, 2, 2 * region) == [
        Round(Kind.STRAIGHT, (Chunk(1, 0, 2 * STRAIGHT_BYTES),), 0),
        Round(Kind.SPLIT, (Chunk(4, 0, region),), region),
        Round(Kind.SPLIT, (Chunk(4, region, 2 * STRAIGHT_BYTES),), STRAIGHT_BYTES - 32),
        Round(Kind.PACKED, (Chunk(0, 0, 52), Chunk(3, 0, 60)), 112),
    ]


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 100_000, MIB])
def test_every_byte_travels_once(world_size: int, bucket_bytes: int) -> None:
    items = [item_of(t, world_size, straight=i % 2 == 0) for i, t in enumerate(random_tensors(0))]
    rounds = rounds_of(items, world_size, bucket_bytes)
    for i, item in enumerate(items):
        spans = [
            item.held_by(rank, c.first, c.last)
            for each in rounds
            for c in each.chunks
            if c.item == i
            for rank in range(world_size)
        ]
        covered = sorted(span for span in spans if span[0] < span[1])
        ends = [0, *(end for _, end in covered)]
        assert [start for start, _ in covered] == ends[:-1]
        assert ends[-1] == item.nbytes
    assert all(world_size * each.width <= max(bucket_bytes, 64 * world_size) for each in rounds)


# ---- the transfer


def rows_of(tensor: Tensor) -> Tensor:
    chunks = tensor.chunk(dist.get_world_size()) if tensor.shape[0] else (tensor,)
    rank = dist.get_rank()
    return (chunks[rank] if rank < len(chunks) else tensor[:0]).clone()


@two_ranks
@pytest.mark.parametrize("kib", [slow(3), 40, slow(4000)])
@pytest.mark.parametrize("straight", [slow(False), True])
def test_gathers_what_the_ranks_have(kib: int, straight: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    wire = Wire(group, CPU)
    tensors = random_tensors(kib)
    rows = [rows_of(tensor) for tensor in tensors]
    items = [item_of(tensor, 2, straight) for tensor in tensors]
    even = [item._replace(straight=straight and item.nbytes == 2 * item.share) for item in items]
    arrived: list[int] = []
    fulls = transport.gather(wire, items, rows, rounds_of(items, 2, kib * 1024), 1, CPU, arrived.append)
    everywhere = transport.gather(wire, even, rows, rounds_of(even, 2, kib * 1024), None, CPU, arrived.append)
    assert (len(fulls) > 0) == (dist.get_rank() == 1)
    assert sum(arrived) == (1 + dist.get_rank()) * sum(item.nbytes for item in items)
    for found in (fulls, everywhere) if fulls else (everywhere,):
        for full, tensor in zip(found, tensors, strict=True):
            assert full.view(tensor.dtype).view(tensor.shape).equal(tensor)


@two_ranks
@pytest.mark.parametrize("kib", [3, 40, 4000])
@pytest.mark.parametrize("straight", [False, True])
def test_scatters_what_one_rank_has(kib: int, straight: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    wire = Wire(group, CPU)
    tensors = random_tensors(kib)
    items = [item_of(tensor, 2, straight) for tensor in tensors]
    expected = [rows_of(tensor) for tensor in tensors]
    rows = [torch.zeros_like(each) for each in expected]
    given = tensors if dist.get_rank() == 1 else None
    transport.scatter(wire, items, rows, rounds_of(items, 2, kib * 1024), 1, given)
    assert_same(rows, expected)
    whole = [torch.zeros_like(tensor) for tensor in tensors]
    transport.broadcast(wire, whole, 1, given, kib * 1024)
    assert_same(whole, tensors)


# ---- tensors that are not contiguous


def strided(value: Any) -> Any:
    """Return the state with every tensor strided: in one dim by two elements, in several from the last to the first."""
    if isinstance(value, dict):
        return {key: strided(each) for key, each in value.items()}
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if value.dim() > 1:
        return value.movedim(0, -1).contiguous().movedim(-1, 0)
    return value.repeat_interleave(2)[::2]


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 1), (1, 6), (6, 1), (3, 4), (3, 1, 2), (0, 3)])
def test_bytes_are_in_order_whatever_the_strides(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    expected = as_bytes(tensor)
    assert as_bytes(strided(tensor)).equal(expected)
    for first in range(0, len(expected), 3):
        for last in range(first + 1, len(expected) + 1):
            assert part(strided(tensor), first, last).equal(expected[first:last])


class Narrow(torch.nn.Module):
    """Has parameters with one row on each of two ranks, of one element, and in one dim."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)
        self.column = torch.nn.Parameter(torch.randn(2, 1))
        self.one = torch.nn.Parameter(torch.randn(1))


@two_ranks
@pytest.mark.parametrize("on_every_rank", [False, True])
def test_a_state_of_strided_tensors_is_loaded(on_every_rank: bool) -> None:
    for build in (net, Narrow):
        weights = {name: value + 1 for name, value in build().state_dict().items()}
        model = fxshard.fully_shard(build())
        fxshard.load_full_state_dict(model, on_first(strided(weights), on_every_rank))
        assert_same(dict(fxshard.full_state_dict(model, recipient_rank=None)), weights)


@two_ranks
@pytest.mark.parametrize("on_every_rank", [False, True])
def test_an_optimizer_state_of_strided_tensors_is_loaded(on_every_rank: bool) -> None:
    _, reference = trained()
    state = reference.state_dict()
    model = sharded(net())
    optim = adamw(model)
    fxshard.load_full_optim_state_dict(model, optim, on_first(strided(state), on_every_rank))
    assert_same(fxshard.full_optim_state_dict(model, optim, recipient_rank=None), state)


@two_ranks
@pytest.mark.parametrize("recipient", [1, None])
def test_strided_rows_of_an_optimizer_become_full(recipient: int | None) -> None:
    model: Any = fxshard.fully_shard(Narrow())
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        rows = strided(parameter.detach().to_local().clone())
        mesh, placements = parameter.device_mesh, parameter.placements
        like = DTensor.from_local(rows, mesh, placements, shape=parameter.shape, stride=parameter.stride())
        optim.state[parameter] = {"sharded": like, "rows": rows}
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=recipient, keys="fqn").get("state", {})
    expected = dict(Narrow().named_parameters()) if recipient in (None, dist.get_rank()) else {}
    assert_same(state, {name: dict.fromkeys(("sharded", "rows"), each.detach()) for name, each in expected.items()})


# ---- the memory


@two_ranks
@pytest.mark.parametrize("straight", [False, True])
@pytest.mark.parametrize("to_all", [False, True])
def test_takes_two_buckets_beside_the_result_and_one_elsewhere(straight: bool, to_all: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    wire = Wire(group, CPU)
    torch.manual_seed(0)
    tensors = [torch.randn(rows, 100) for rows in (2000, 10, 20, 300, 4001, 50, 8000, 7, 600, 10, 20, 900)]
    rows = [rows_of(tensor) for tensor in tensors]
    items = [item_of(tensor, 2, straight and tensor.shape[0] % 2 == 0) for tensor in tensors]
    bucket_bytes = 600_000
    rounds = rounds_of(items, 2, bucket_bytes)
    kinds = {each.kind for each in rounds}
    assert kinds == ({Kind.PACKED, Kind.SPLIT} | ({Kind.STRAIGHT} if straight else set()))
    with PeakMemory() as memory:
        fulls = transport.gather(wire, items, rows, rounds, None if to_all else 0, CPU, lambda _: None)
    result = sum(item.nbytes for item in items) if fulls else 0
    extra = memory.peak - result
    assert 0 < extra <= (2 if fulls else 1) * bucket_bytes


@two_ranks
def test_a_large_tensor_takes_no_memory_beside_the_result() -> None:
    model: Any = torch.nn.Linear(3000, 1001, bias=False)
    fxshard.fully_shard(model)
    with PeakMemory() as memory:
        state = fxshard.full_state_dict(model)
    nbytes = 3000 * 1001 * 4 if dist.get_rank() == 0 else 0
    assert sum(each.untyped_storage().nbytes() for each in state.values()) == nbytes
    assert memory.peak - nbytes < 10_000


@two_ranks
@pytest.mark.parametrize("to_all", [False, True])
def test_rows_that_are_not_contiguous_are_copied_piece_by_piece(to_all: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    wire = Wire(group, CPU)
    torch.manual_seed(0)
    tensors = [torch.randn(rows, 100) for rows in (2000, 10, 4001, 50, 8000, 300)]
    rows = [rows_of(tensor).t().contiguous().t() for tensor in tensors]
    items = [item_of(tensor, 2, False) for tensor in tensors]
    bucket_bytes = 300_000
    rounds = rounds_of(items, 2, bucket_bytes)
    with PeakMemory() as memory:
        fulls = transport.gather(wire, items, rows, rounds, None if to_all else 0, CPU, lambda _: None)
    for full, tensor in zip(fulls, tensors, strict=False):
        assert full.view(tensor.dtype).view(tensor.shape).equal(tensor)
    extra = memory.peak - (sum(item.nbytes for item in items) if fulls else 0)
    assert extra <= 3 * bucket_bytes  # all rows are 2.8 MB


@two_ranks
def test_state_that_is_not_on_the_device_of_its_mesh_stays_where_it_is() -> None:
    mesh = world_mesh()
    here, there = torch.zeros(2, 3), torch.zeros(2, 3, device="meta")
    held = [LocalShard((4, 3), torch.float32, local, mesh) for local in (here, there, here)]
    devices: list[tuple[str, int]] = []

    def record(wire: Any, items: Any, rows: Any, rounds: Any, recipient: int, device: torch.device, _: Any) -> Any:
        devices.append((device.type, len(items)))
        return [torch.zeros(item.nbytes, dtype=torch.uint8) for item in items]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "gather", record)
        patch.setattr(DeviceMesh, "device_type", "meta")
        gather_all(held, recipient=0, cpu_offload=False, bucket_mib=1, title="")
    assert devices == [("cpu", 2), ("meta", 1)]


def test_what_is_on_the_host_and_not_cut_into_rows_is_made_full_on_the_device(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of tensor parallelism, say."""
    placed, devices = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None), list[str]()

    def record(dtensor: DTensor) -> Tensor:
        devices.append(local_of(dtensor).device.type)
        return torch.ones(4)

    monkeypatch.setattr(DTensor, "full_tensor", record)
    monkeypatch.setattr(DeviceMesh, "device_type", "meta")
    held = [LocalShard((4,), torch.float32, placed, None, other=True)]
    (full,) = gather_all(held, recipient=None, cpu_offload=True, bucket_mib=1, title="") or []
    assert (devices, full.tolist()) == (["meta"], [1.0] * 4)


@two_ranks
def test_small_buckets_give_the_same() -> None:
    model = net()
    fxshard.fully_shard(model)
    expected = fxshard.full_state_dict(model, recipient_rank=None)
    found = fxshard.full_state_dict(model, recipient_rank=None, bucket_mib=1e-6)
    assert_same(found, expected)
    fxshard.load_full_state_dict(model, found if dist.get_rank() == 1 else {}, bucket_mib=1e-6)
    assert_same(fxshard.full_state_dict(model, recipient_rank=None), expected)
