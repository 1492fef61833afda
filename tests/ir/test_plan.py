"""The layout of a unit: slots tile their shard, and cut, gather and trim give every parameter back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxshard.ir import collectives
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.plan import ParameterSpec, ShardPlan, Slot, UnitPlan, lay_out
from tests.steps import shard_of

WORLD_SIZES = st.integers(1, 8)
SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4)
SHAPES_WITH_ELEMENTS = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=4)
QUICK = settings(max_examples=60, deadline=None)


def spec(fqn: str, *shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> ParameterSpec:
    return ParameterSpec(fqn=fqn, shape=shape, dtype=dtype, trainable=trainable)


def one_shard(shapes: list[tuple[int, ...]], world_size: int) -> ShardPlan:
    (plan,) = lay_out([spec(f"p{i}", *shape) for i, shape in enumerate(shapes)], world_size)
    return plan


def numbered(plan: ShardPlan) -> dict[str, Tensor]:
    """A value for each parameter, no element of which is zero or equal to another."""
    values, first = {}, 1
    for slot in plan.slots:
        values[slot.fqn] = torch.arange(first, first + slot.full_numel, dtype=torch.float32).view(slot.shape)
        first += slot.full_numel
    return values


def unit_of(shard: ShardPlan, world_size: int) -> UnitPlan:
    return UnitPlan(fqn="", shards=(shard,), world_size=world_size, group="0")


def cut(slots: Sequence[SlotIndex], data: st.DataObject) -> Iterator[tuple[SlotIndex, ...]]:
    """Cut a row of slots anywhere."""
    start = 0
    while start < len(slots):
        end = data.draw(st.integers(start + 1, len(slots)))
        yield tuple(slots[start:end])
        start = end


def gathered(plan: ShardPlan, values: dict[str, Tensor], world_size: int) -> Tensor:
    return torch.cat([shard_of(plan, values, rank, world_size) for rank in range(world_size)])


def test_groups_parameters_by_dtype_and_trainability_in_registration_order() -> None:
    parameters = [
        spec("a", 4),
        spec("b", 4, dtype=torch.bfloat16),
        spec("c", 2),
        spec("d", 4, trainable=False),
        spec("e", 4, dtype=torch.bfloat16),
    ]
    shards = lay_out(parameters, 2)
    found = [(shard.dtype, shard.trainable, [slot.fqn for slot in shard.slots]) for shard in shards]
    assert found == [
        (torch.float32, True, ["a", "c"]),
        (torch.bfloat16, True, ["b", "e"]),
        (torch.float32, False, ["d"]),
    ]


def test_pads_a_slot_to_the_rows_of_the_first_rank() -> None:
    (shard,) = lay_out([spec("weight", 5, 3), spec("bias", 5), spec("gain")], 2)
    assert shard.slots == (
        Slot(fqn="weight", shape=(5, 3), offset=0, numel=9),
        Slot(fqn="bias", shape=(5,), offset=9, numel=3),
        Slot(fqn="gain", shape=(), offset=12, numel=1),
    )
    assert [shard.slots[0].local_shape(rank, 2) for rank in range(2)] == [(3, 3), (2, 3)]


def test_gives_every_rank_a_scalar() -> None:
    (slot,) = one_shard([()], 4).slots
    assert slot.replicated
    assert [slot.local_shape(rank, 4) for rank in range(4)] == [()] * 4


def test_counts_the_bytes_of_a_gathered_unit_in_its_unsharded_dtype() -> None:
    shards = lay_out([spec("weight", 5, 3), spec("index", 4, dtype=torch.int64, trainable=False)], 2)
    unit = UnitPlan(fqn="", shards=shards, world_size=2, group="0", param_dtype=torch.bfloat16)
    assert unit.unsharded_bytes == 2 * 9 * 2 + 2 * 2 * 8
    assert [unit.unsharded_dtype(shard) for shard in shards] == [torch.bfloat16, torch.int64]


def test_blocks_share_a_graph_only_with_as_many_replicas_of_one_group() -> None:
    one = UnitPlan(fqn="", shards=(one_shard([(4,)], 2),), world_size=2, group="0")
    several = replace(one, replicas=4, replicate_group="1")
    others = [one, several, replace(several, replicate_group="2"), replace(several, replicas=2)]
    assert len({unit.sharing_key for unit in others}) == 4
    assert (several.num_ranks, several.groups) == (8, {"0": 2, "1": 4})
    assert (one.num_ranks, one.groups) == (2, {"0": 2})


@QUICK
@given(SHAPES, WORLD_SIZES)
def test_tiles_the_shard_with_slots(shapes: list[tuple[int, ...]], world_size: int) -> None:
    plan = one_shard(shapes, world_size)
    ends = [slot.offset + slot.numel for slot in plan.slots]
    assert [slot.offset for slot in plan.slots] == [0, *ends[:-1]]
    assert plan.numel == ends[-1]


@QUICK
@given(st.integers(0, 30), WORLD_SIZES)
def test_cuts_rows_as_chunk_does(rows: int, world_size: int) -> None:
    whole = torch.arange(rows)
    chunks = [*torch.chunk(whole, world_size), *[whole[:0]] * world_size][:world_size]
    (slot,) = one_shard([(rows,)], world_size).slots
    for rank, chunk in enumerate(chunks):
        assert whole[slice(*slot.rows_of(rank, world_size))].tolist() == chunk.tolist()


@QUICK
@given(SHAPES, WORLD_SIZES)
def test_fits_the_rows_of_every_rank_into_its_slot(shapes: list[tuple[int, ...]], world_size: int) -> None:
    for slot in one_shard(shapes, world_size).slots:
        sizes = [math.prod(slot.local_shape(rank, world_size)) for rank in range(world_size)]
        assert max(sizes) <= slot.numel
        assert slot.replicated or sum(sizes) == slot.full_numel


@QUICK
@given(SHAPES, WORLD_SIZES, st.data())
def test_gives_every_parameter_back_however_its_shard_is_cut(
    shapes: list[tuple[int, ...]], world_size: int, data: st.DataObject
) -> None:
    shard = one_shard(shapes, world_size)
    unit, values = unit_of(shard, world_size), numbered(shard)
    slots = [(0, i) for i in range(len(shard.slots))]
    segments = list(cut(slots, data))
    ranks = [shard_of(shard, values, rank, world_size) for rank in range(world_size)]
    sent = [collectives.gather_inputs({0: flat}, unit, segments) for flat in ranks]
    for tensors, flat in zip(sent, ranks, strict=True):
        assert all(tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for tensor in tensors)
    found = collectives.parameters_in(
        [torch.cat(tensors) for tensors in zip(*sent, strict=True)], unit, segments, slots
    )
    for slot, parameter in zip(shard.slots, found, strict=True):
        assert torch.equal(parameter, values[slot.fqn])
        assert parameter.is_contiguous()


@QUICK
@given(SHAPES, WORLD_SIZES, st.data())
def test_gives_every_rank_its_rows_of_the_mean_however_gradients_are_cut(
    shapes: list[tuple[int, ...]], world_size: int, data: st.DataObject
) -> None:
    shard = one_shard(shapes, world_size)
    unit, values = unit_of(shard, world_size), numbered(shard)
    missing = data.draw(st.sets(st.integers(0, len(shapes) - 1), max_size=len(shapes) - 1))
    grads = {(0, i): values[slot.fqn] for i, slot in enumerate(shard.slots) if i not in missing}
    segments = list(cut(data.draw(st.permutations(list(grads))), data))
    tensors = [[grads[slot] for slot in segment] for segment in segments]
    inputs = collectives.reduce_inputs(tensors, unit, torch.float32)  # the same on every rank, so is their mean
    expected = {s.fqn: values[s.fqn] if (0, i) in grads else values[s.fqn] * 0 for i, s in enumerate(shard.slots)}
    for rank in range(world_size):
        launched = [tensor.chunk(world_size)[rank] for tensor in inputs] if world_size > 1 else inputs
        reduced = collectives.reduced_in(launched, torch.float32, unit)
        found = collectives.shard_grads(dict(zip(segments, reduced, strict=True)), unit)
        assert torch.equal(found[0], shard_of(shard, expected, rank, world_size))


@QUICK
@given(SHAPES_WITH_ELEMENTS, WORLD_SIZES)
def test_lays_gradients_out_as_the_shards_of_all_ranks(shapes: list[tuple[int, ...]], world_size: int) -> None:
    plan = one_shard(shapes, world_size)
    values = numbered(plan)
    rows = [value.expand(world_size) if value.dim() == 0 else value for value in values.values()]
    copied_in = torch.ops.aten._chunk_cat(rows, 0, world_size).view(-1)
    assert torch.equal(copied_in, gathered(plan, values, world_size))
