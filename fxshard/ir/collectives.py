"""The collectives of a unit, written once: run as they are by the eager path, traced into graphs by the passes.

Only `_c10d_functional` ops: they trace, Inductor keeps their order, and LocalTensorMode can run them for all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from fxshard.ir.plan import ShardPlan, Slot, UnitPlan

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten

ALL_GATHER = _c10d.all_gather_into_tensor.default
ALL_GATHER_COALESCED = _c10d.all_gather_into_tensor_coalesced.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
WAIT = _c10d.wait_tensor.default
LAUNCHES = (ALL_GATHER, ALL_GATHER_COALESCED, REDUCE_SCATTER)

REDUCES_IN_STORAGE_DTYPE = hasattr(FSDPParam, "unsharded_grad_dtype")
"""What `MixedPrecisionPolicy(reduce_dtype=None)` means in this torch: the parameter's dtype, as FSDP2 from 2.15 on, or
the dtype of the gradient, as FSDP2 before."""

SlotIndex = tuple[int, int]
"""(shard, slot): a parameter of a unit."""


def unshard_launches(graph: fx.Graph) -> list[fx.Node]:
    """The all_gather nodes of `graph`, in program order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target in (ALL_GATHER, ALL_GATHER_COALESCED)]


def reduce_launches(graph: fx.Graph) -> list[fx.Node]:
    """The reduce_scatter nodes of `graph`, in program order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target is REDUCE_SCATTER]


def unshard(shards: Sequence[Tensor], plan: UnitPlan, reads: Sequence[SlotIndex]) -> list[Tensor]:
    """Gather a unit in one launch and give the parameters that are read.

    The launch's input is the shard itself, or its one cast: nothing is copied in.

    Args:
        shards: this rank's flat tensors, `[shard_numel]` each, for every shard that `reads` names, in their order.
        plan: the unit.
        reads: the parameters to return.

    Returns:
        For each read the unsharded parameter, contiguous, in the unit's unsharded dtype.
    """
    used = sorted({shard for shard, _ in reads})
    inputs = [s.to(plan.unsharded_dtype(plan.shards[i])) for i, s in zip(used, shards, strict=True)]
    gathered = dict(zip(used, _all_gather(inputs, plan), strict=True))
    parameters: dict[SlotIndex, Tensor] = {}
    for index, full in gathered.items():
        wanted = sorted({slot for shard, slot in reads if shard == index})
        for slot, value in zip(wanted, _copy_out(full, plan.shards[index], wanted, plan.world_size), strict=True):
            parameters[index, slot] = value
    return [parameters[read] for read in reads]


def _all_gather(inputs: list[Tensor], plan: UnitPlan) -> list[Tensor]:
    if plan.world_size == 1:
        return inputs
    if len(inputs) == 1:
        return [_c10d.wait_tensor(_c10d.all_gather_into_tensor(inputs[0], plan.world_size, plan.group))]
    launched = _c10d.all_gather_into_tensor_coalesced(inputs, plan.world_size, plan.group)
    return [_c10d.wait_tensor(t) for t in launched]


def _copy_out(full: Tensor, shard: ShardPlan, wanted: Sequence[int], world_size: int) -> list[Tensor]:
    """Turn the columns of `[world_size, shard_numel]` that belong to each wanted slot into its parameter.

    `contiguous` copies only where it must: not for one rank, nor for a slot that is the whole shard.
    """
    columns = full.view(world_size, shard.numel)
    slots = [shard.slots[i] for i in wanted]
    return [_trim(columns.narrow(1, slot.offset, slot.numel).contiguous(), slot) for slot in slots]


def _trim(block: Tensor, slot: Slot) -> Tensor:
    """`[world_size, slot_numel]` -> the parameter, without the padding rows."""
    if block.numel() != slot.full_numel:
        block = block.view(-1)[: slot.full_numel]
    return block.view(slot.shape)


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a sum over ranks becomes a mean: FSDP2's `_get_gradient_divide_factors` for one data-parallel group.

    Attributes:
        before: divisor before the reduction, 1 for none.
        op: "sum" or "avg".
        after: divisor after the reduction, 1 for none.
    """

    before: float
    op: str
    after: float


def division(world_size: int, dtype: torch.dtype) -> Division:
    """The division rule for a reduction in `dtype`.

    fp32 and bf16 cannot overflow here and use the group's own average. Other dtypes divide by about sqrt(world_size)
    before and by the rest after, which keeps fp16 sums in range.
    """
    if dtype in (torch.float32, torch.bfloat16):
        return Division(before=1, op="avg" if world_size > 1 else "sum", after=1)
    before = 1
    while world_size % before == 0 and world_size / before > before:
        before *= 2
    return Division(before=before, op="sum", after=world_size / before)


def reduce_grads(grads: Sequence[Tensor], plan: UnitPlan, writes: Sequence[SlotIndex]) -> dict[int, Tensor]:
    """Average gradients over the group and give each rank its shard of them, one launch per reduce dtype.

    Args:
        grads: unsharded gradients, each of its parameter's shape.
        plan: the unit.
        writes: the parameter of each gradient, sorted.

    Returns:
        Shard index -> `[shard_numel]` in the shard's dtype, zeros where no gradient was given.
    """
    groups: dict[torch.dtype, list[int]] = {}
    for i, (grad, (shard, _)) in enumerate(zip(grads, writes, strict=True)):
        default = plan.shards[shard].dtype if REDUCES_IN_STORAGE_DTYPE else grad.dtype
        groups.setdefault(plan.reduce_dtype or default, []).append(i)
    pieces: dict[SlotIndex, Tensor] = {}
    whole: dict[int, Tensor] = {}
    for dtype, members in groups.items():
        slots = [writes[i] for i in members]
        reduced = _reduce_scatter([grads[i] for i in members], plan, slots, dtype)
        if only := _covered_shard(plan, slots):
            whole[only[0]] = reduced.to(plan.shards[only[0]].dtype)
            continue
        parts = torch.split(reduced, [plan.shards[shard].slots[slot].numel for shard, slot in slots])
        pieces.update(zip(slots, parts, strict=True))
    return whole | _assemble(pieces, plan)


def _covered_shard(plan: UnitPlan, slots: Sequence[SlotIndex]) -> tuple[int] | None:
    """The one shard whose slots `slots` are, all of them and in order, if there is one."""
    index = slots[0][0]
    return (index,) if list(slots) == [(index, i) for i in range(len(plan.shards[index].slots))] else None


def _reduce_scatter(grads: list[Tensor], plan: UnitPlan, slots: list[SlotIndex], dtype: torch.dtype) -> Tensor:
    """Concatenate into `[world_size, n]` (the copy-in), reduce in `dtype`, return this rank's `[n]`."""
    world_size = plan.world_size
    rows = [(g.expand(world_size) if g.dim() == 0 else g).to(dtype) for g in grads if g.numel()]
    if not rows:  # only parameters without elements: nothing to send
        return grads[0].new_zeros(0, dtype=dtype)
    flat: Tensor = torch.ops.aten._chunk_cat(rows, 0, world_size).view(-1)
    rule = division(world_size, dtype)
    if rule.before != 1:
        flat = flat / rule.before
    if world_size > 1:
        flat = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(flat, rule.op, world_size, plan.group))
    return flat / rule.after if rule.after != 1 else flat


def _assemble(pieces: dict[SlotIndex, Tensor], plan: UnitPlan) -> dict[int, Tensor]:
    """Put reduced slots into their shards, zeros between them."""
    shards: dict[int, Tensor] = {}
    for index in sorted({shard for shard, _ in pieces}):
        plan_shard = plan.shards[index]
        like = next(piece for (shard, _), piece in pieces.items() if shard == index)
        parts = [
            pieces[index, i].to(plan_shard.dtype)
            if (index, i) in pieces
            else like.new_zeros(slot.numel, dtype=plan_shard.dtype)
            for i, slot in enumerate(plan_shard.slots)
        ]
        shards[index] = torch.cat(parts)
    return shards
