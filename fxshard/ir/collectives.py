"""The collectives of a unit, written once: run as they are by the eager path, traced into graphs by the passes.

Only `_c10d_functional` ops: they trace, Inductor keeps their order, and LocalTensorMode can run them for all ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, fx

from fxshard.ir import ops
from fxshard.ir.plan import ShardPlan, Slot, UnitPlan
from fxshard.torch_private import REDUCES_IN_STORAGE_DTYPE

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
_IN_FLIGHT = ("_c10d_functional", "_c10d_functional_autograd")
_DONE_AT_ONCE = ("_dtensor", "symm_mem")
"""Namespaces of torch's collectives: those whose results must be waited for, and those that wait themselves."""

ALIGNMENT = 16
"""Bytes at whose multiples parameters begin: complex views and vector loads of kernels want it."""

ALONE_BYTES = 1 << 20
"""A parameter of so many unsharded bytes that is gathered or reduced outside of graphs is sent by itself."""

ALL_GATHER = _c10d.all_gather_into_tensor.default
ALL_GATHER_COALESCED = _c10d.all_gather_into_tensor_coalesced.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
REDUCE_SCATTER_COALESCED = _c10d.reduce_scatter_tensor_coalesced.default
ALL_REDUCE = _c10d.all_reduce.default
ALL_REDUCE_COALESCED = _c10d.all_reduce_coalesced.default
WAIT = _c10d.wait_tensor.default
WAITS = (WAIT, ops.DEFERRED_WAIT)
"""The wait in the graph, and the mark of one that the runtime makes later: `HandOffReductions`."""
GATHERS = (ALL_GATHER, ALL_GATHER_COALESCED, ops.PREFETCHED_ALL_GATHER, ops.ALL_GATHER_ON_STREAM)
REDUCTIONS = (REDUCE_SCATTER, REDUCE_SCATTER_COALESCED, ops.REDUCE_SCATTER_ON_STREAM)
ALL_REDUCES = (ALL_REDUCE, ALL_REDUCE_COALESCED)
"""Of reduced shards, over the mesh axis that replicates."""
COALESCED = (
    ALL_GATHER_COALESCED,
    REDUCE_SCATTER_COALESCED,
    ALL_REDUCE_COALESCED,
    ops.PREFETCHED_ALL_GATHER,
    ops.ALL_GATHER_ON_STREAM,
    ops.REDUCE_SCATTER_ON_STREAM,
)
"""Launches of a list of tensors."""
LAUNCHES = (*GATHERS, *REDUCTIONS, *ALL_REDUCES)

SlotIndex = tuple[int, int]
"""(shard, slot): a parameter of a unit."""

UnitSlot = tuple[str, SlotIndex]
"""(unit key, parameter of it)."""

Segment = tuple[SlotIndex, ...]
"""Parameters that travel as one tensor of a launch. Gathered ones follow each other in one shard."""


def is_launch(node: fx.Node) -> bool:
    """Return whether a node starts a collective, ours or another library's."""
    target = node.target
    return target in LAUNCHES or (
        _is_of(target, *_IN_FLIGHT, *_DONE_AT_ONCE) and "group_name" in _argument_names(target)
    )


def waits_itself(node: fx.Node) -> bool:
    """Return whether a launch is over when the next node runs, such as DTensor's `shard_dim_alltoall`."""
    return is_launch(node) and _is_of(node.target, *_DONE_AT_ONCE)


def is_wait(node: fx.Node) -> bool:
    """Return whether a node waits for a collective, or stands for a wait after the graph has ended."""
    return node.target is ops.DEFERRED_WAIT or (
        _is_of(node.target, *_IN_FLIGHT) and node.target._opname in ("wait_tensor", "wait_tensors")
    )


def _is_of(target: object, *namespaces: str) -> TypeGuard[torch._ops.OpOverload]:
    return isinstance(target, torch._ops.OpOverload) and target.namespace in namespaces


def unshard_launches(graph: fx.Graph) -> list[fx.Node]:
    """Return the all_gather nodes of `graph`, in program order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target in GATHERS]


def reduce_launches(graph: fx.Graph) -> list[fx.Node]:
    """Return the reduce_scatter nodes of `graph`, in program order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target in REDUCTIONS]


def all_reduce_launches(graph: fx.Graph) -> list[fx.Node]:
    """Return the all_reduce nodes of `graph`, in program order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target in ALL_REDUCES]


def arguments_of(launch: fx.Node) -> dict[str, Any]:
    """Return the arguments of a launch by their names in its schema."""
    return dict(zip(_argument_names(launch.target), launch.args, strict=False)) | launch.kwargs


@functools.cache
def _argument_names(target: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in target._schema.arguments)


def launch_inputs(launch: fx.Node) -> list[fx.Node | None]:
    """Return the tensors that a launch sends, one by one; the flat for parts of it, see `sent_part`."""
    sent = launch.args[0]
    if launch.target is ops.PREFETCHED_ALL_GATHER:
        sent = [sent] * len(arguments_of(launch)["numels"])
    given = sent if isinstance(sent, list | tuple) else [sent]
    return [value if isinstance(value, fx.Node) else None for value in given]


def launch_input(launch: fx.Node, index: int) -> fx.Node | None:
    """Return the tensor that a launch sends, or the `index`-th of a coalesced one."""
    inputs = launch_inputs(launch)
    return inputs[index] if index < len(inputs) else None


def sent_part(launch: fx.Node, index: int) -> tuple[int, int] | None:
    """Return the first element and the number of elements that are sent of input `index`; `None` for all of it."""
    if launch.target is not ops.PREFETCHED_ALL_GATHER:
        return None
    given = arguments_of(launch)
    return given["starts"][index], given["numels"][index]


def sent_dtype(launch: fx.Node) -> torch.dtype | None:
    """Return the dtype to which a launch casts what it sends; `None` if it sends its inputs as they are."""
    dtype: torch.dtype | None = arguments_of(launch).get("dtype")
    return dtype


def world_size_of(launch: fx.Node) -> int:
    """Return the number of ranks that a launch names; 0 for an all_reduce, which names none."""
    size = arguments_of(launch).get("group_size")
    return size if isinstance(size, int) else 0


def group_of(launch: fx.Node) -> str:
    """Return the process group that a launch names."""
    return str(arguments_of(launch).get("group_name"))


# ---- gather


def whole_shards(slots: Iterable[SlotIndex], plan: UnitPlan) -> list[Segment]:
    """Return one segment for each shard in which one of `slots` lies."""
    used = sorted({shard for shard, _ in slots})
    return [tuple((shard, i) for i in range(len(plan.shards[shard].slots))) for shard in used]


def launch_unshard(
    shards: Mapping[int, Tensor], plan: UnitPlan, *, in_parts: bool = False
) -> Iterator[tuple[list[Segment], list[Tensor]]]:
    """Start the gather of a unit, and yield what `parameters_in` takes; one part follows the other as it is taken.

    `shards` maps shard index -> this rank's flat, `[shard_numel]`. Large parameters are sent as segments of their own,
    so that they need not be copied out, and with `in_parts` each is a part.
    """
    reads = [(i, j) for i, shard in plan.gathered for j in range(len(shard.slots))]
    segments = [piece for segment in whole_shards(reads, plan) for piece in _without_large(segment, plan)]
    parts: dict[SlotIndex | None, list[tuple[Segment, Tensor]]] = {}
    for segment, sent in zip(segments, gather_inputs(shards, plan, segments), strict=True):
        is_alone = in_parts and _is_large(segment[0], plan)
        parts.setdefault(segment[0] if is_alone else None, []).append((segment, sent))
    for part in parts.values():
        inputs = [sent for _, sent in part]
        yield [segment for segment, _ in part], launch_gather(inputs, plan.world_size, plan.gathering_group)


def _without_large(segment: Segment, plan: UnitPlan) -> list[Segment]:
    """Cut a segment at its large parameters: each is a segment of its own."""
    cut: list[Segment] = []
    for is_large, found in itertools.groupby(segment, lambda slot: _is_large(slot, plan)):
        slots = tuple(found)
        cut.extend([(slot,) for slot in slots] if is_large else [slots])
    return cut


def _is_large(slot: SlotIndex, plan: UnitPlan) -> bool:
    return plan.slot(slot).full_numel * plan.unsharded_dtype_of(slot).itemsize >= ALONE_BYTES


def launch_parameters(shards: Mapping[int, Tensor], plan: UnitPlan) -> dict[SlotIndex, Tensor]:
    """Start the gather of all parameters of a unit, each as a contiguous tensor of its own, to be waited for."""
    slots = {(i, j): slot for i, shard in plan.gathered for j, slot in enumerate(shard.slots)}
    segments: list[Segment] = [(index,) for index, slot in slots.items() if slot.numel]
    launched = launch_gather(gather_inputs(shards, plan, segments), plan.world_size, plan.gathering_group)
    found = {segment[0]: buffer for segment, buffer in zip(segments, launched, strict=True)}
    for (i, j), slot in slots.items():
        if not slot.numel:
            found[i, j] = shards[i].new_empty(slot.shape, dtype=plan.unsharded_dtype(plan.shards[i]))
    return {index: _trim(buffer, slots[index]) for index, buffer in found.items()}


def gather_inputs(shards: Mapping[int, Tensor], plan: UnitPlan, segments: Sequence[Segment]) -> list[Tensor]:
    """Return what a rank sends, `[segment_numel]` each: the shard itself, its one cast, or a view of it."""
    cast = {i: shards[i].to(plan.unsharded_dtype(plan.shards[i])) for i in sorted({seg[0][0] for seg in segments})}
    return [_columns(cast[segment[0][0]], 0, *_extent(segment, plan)) for segment in segments]


def launch_gather(inputs: list[Tensor], world_size: int, group: str) -> list[Tensor]:
    """Start one all_gather for each dtype of `inputs`; each result is `[world_size * numel]`, to be waited for."""
    if world_size == 1:
        return inputs
    results: dict[int, Tensor] = {}
    # Not one for all: gloo reads all tensors of a coalesced all_gather in the dtype of the first.
    for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
        places = [i for i, tensor in enumerate(inputs) if tensor.dtype is dtype]
        if len(places) == 1:
            results[places[0]] = _c10d.all_gather_into_tensor(inputs[places[0]], world_size, group)
        else:
            together = _c10d.all_gather_into_tensor_coalesced([inputs[i] for i in places], world_size, group)
            results |= zip(places, together, strict=True)
    return [results[i] for i in range(len(inputs))]


def parameters_in(
    launched: Sequence[Tensor], plan: UnitPlan, segments: Sequence[Segment], reads: Sequence[SlotIndex]
) -> list[Tensor]:
    """Wait for the segments of a unit and return the parameters in them.

    A parameter that is a segment of its own is the gathered buffer. Of several in one segment, each is a block of
    columns of `[world_size, segment_numel]` and is copied out; on one rank, where it is a view of the shard, only if
    that does not begin at a multiple of `ALIGNMENT`.
    """
    parameters: dict[SlotIndex, Tensor] = {}
    for buffer, segment in zip(launched, segments, strict=True):
        gathered = _c10d.wait_tensor(buffer) if plan.world_size > 1 else buffer
        wanted = sorted(set(segment) & set(reads))
        if not wanted:
            continue
        start, numel = _extent(segment, plan)
        rows = gathered.view(plan.world_size, numel) if len(segment) > 1 else gathered
        for shard, i in wanted:
            slot = plan.shards[shard].slots[i]
            block = _columns(rows, 1, slot.offset - start, slot.numel).contiguous() if len(segment) > 1 else rows
            if plan.world_size == 1 and slot.offset * block.element_size() % ALIGNMENT:
                block = ops.COPY(block)
            parameters[shard, i] = _trim(block, slot)
    return [parameters[read] for read in reads]


def _extent(segment: Segment, plan: UnitPlan) -> tuple[int, int]:
    """Return the first element of a segment in its shard, and the number of elements."""
    slots = [plan.shards[shard].slots[i] for shard, i in segment]
    return slots[0].offset, sum(slot.numel for slot in slots)


def _columns(tensor: Tensor, dim: int, start: int, numel: int) -> Tensor:
    return tensor if (start, numel) == (0, tensor.shape[dim]) else tensor.narrow(dim, start, numel)


def _trim(block: Tensor, slot: Slot) -> Tensor:
    """Drop the padding rows of `[world_size, slot_numel]`, or of the same in one dim."""
    if block.numel() != slot.full_numel:
        block = block.view(-1)[: slot.full_numel]
    return block.view(slot.shape)


# ---- reduce


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a sum over ranks becomes a mean; FSDP2's `_get_gradient_divide_factors`, for one mesh axis or two."""

    before: float  # divisor before the first reduction, 1 for none
    op: str  # "sum" or "avg", of the reduction over the axis that shards
    after: float  # divisor after the last reduction, 1 for none
    outer: str = "sum"  # "sum" or "avg", of the reduction over the axis that replicates


def division(
    num_ranks: int, dtype: torch.dtype, *, world_size: int = 0, factor: float | None = None, sums_only: bool = False
) -> Division:
    """Return the division rule for a reduction in `dtype` over the ranks of both mesh axes.

    fp32 and bf16 cannot overflow here and use the group's own average, unless `sums_only`. Other dtypes divide by about
    sqrt(num_ranks) before and by the rest after: fp16 sums then stay in range. A `factor` takes the place of the number
    of ranks; for it alone `world_size`, the ranks of the axis that shards, is read.
    """
    cannot_overflow = dtype in (torch.float32, torch.bfloat16)
    if cannot_overflow and not sums_only:
        if factor is None:
            op = "avg" if num_ranks > 1 else "sum"
            return Division(before=1, op=op, after=1, outer=op)
        if factor == world_size > 1:
            return Division(before=1, op="avg", after=1)
    total, before = factor or num_ranks, 1
    while not cannot_overflow and total % before == 0 and total / before > before:
        before *= 2
    return Division(before=before, op="sum", after=total / before)


def division_of(unit: UnitPlan, dtype: torch.dtype) -> Division:
    """Return the division rule for a unit's reductions in `dtype`."""
    return division(
        unit.num_ranks, dtype, world_size=unit.world_size, factor=unit.divide_factor, sums_only=unit.sums_only
    )


def reduce_dtypes(dtypes: Mapping[SlotIndex, torch.dtype], plan: UnitPlan) -> dict[torch.dtype, tuple[SlotIndex, ...]]:
    """Return which gradients are reduced together, by reduce dtype; `dtypes` are the gradients' own."""
    groups: dict[torch.dtype, list[SlotIndex]] = {}
    for slot, dtype in dtypes.items():
        shard = plan.shards[slot[0]]
        default = shard.gradient_dtype if REDUCES_IN_STORAGE_DTYPE or shard.grad_dtype else dtype
        groups.setdefault(plan.reduce_dtype or default, []).append(slot)
    return {dtype: tuple(slots) for dtype, slots in groups.items()}


class LaunchedGrads(NamedTuple):
    """Gradients of one reduce dtype that are on their way."""

    dtype: torch.dtype
    pieces: list[Segment]  # the gradients in each of `launched`
    launched: list[Tensor]  # this rank's part of their mean, `[numel / world_size]`, to be waited for


def reduce_grads(grads: Mapping[SlotIndex, Tensor], plan: UnitPlan) -> dict[int, Tensor]:
    """Average gradients over the group, with one reduction per reduce dtype, and return this rank's shard of them.

    `grads` are unsharded, in their parameters' shapes and registration order. Returns shard index -> `[shard_numel]` in
    the dtype of its gradients, zeros where no gradient was given.
    """
    return arrived_grads(launch_grads(grads, plan), plan)


def launch_grads(grads: Mapping[SlotIndex, Tensor], plan: UnitPlan) -> list[LaunchedGrads]:
    """Do the first part of `reduce_grads`, until nothing is left but to wait for the last launches."""
    found = []
    for dtype, segment in reduce_dtypes({slot: grad.dtype for slot, grad in grads.items()}, plan).items():
        pieces = _without_large(segment, plan)
        inputs = reduce_inputs([[grads[slot] for slot in piece] for piece in pieces], plan, dtype)
        launched = launch_all_reduce(launch_reduce(inputs, dtype, plan), dtype, plan)
        found.append(LaunchedGrads(dtype, pieces, launched))
    return found


def arrived_grads(launches: Iterable[LaunchedGrads], plan: UnitPlan) -> dict[int, Tensor]:
    """Do the second part of `reduce_grads`: wait, and make gradients of shards."""
    reduced: dict[Segment, Tensor] = {}
    for dtype, pieces, launched in launches:
        reduced |= zip(pieces, reduced_in(launched, dtype, plan), strict=True)
    return shard_grads(reduced, plan)


def reduce_inputs(grads: Sequence[Sequence[Tensor]], unit: UnitPlan, dtype: torch.dtype) -> list[Tensor]:
    """Return what a rank sends of its gradients: per group one tensor, `[world_size * n]`, cast, divided and padded."""
    inputs, world_size, rule = [], unit.world_size, division_of(unit, dtype)
    for group in grads:
        rows = [(grad.expand(world_size) if grad.dim() == 0 else grad) for grad in group]
        filled = [row.to(dtype) for row in rows if row.numel()]
        if len(filled) == 1:
            flat = _padded(filled[0], world_size).reshape(-1).contiguous()  # a scalar was expanded
        elif filled:
            flat = torch.ops.aten._chunk_cat(filled, 0, world_size).view(-1)
        else:  # only parameters without elements: nothing to send
            flat = rows[0].new_zeros(0, dtype=dtype)
        inputs.append(flat / rule.before if rule.before != 1 else flat)
    return inputs


def sum_dtype(terms: Sequence[fx.Node]) -> torch.dtype:
    """Return the dtype of the sum of some gradients."""
    dtypes: list[torch.dtype] = [term.meta["val"].dtype for term in terms]
    return functools.reduce(torch.promote_types, dtypes)


def _padded(rows: Tensor, world_size: int) -> Tensor:
    missing = -rows.shape[0] % world_size
    return _aten.constant_pad_nd(rows, [0, 0] * (rows.dim() - 1) + [0, missing]) if missing else rows


def launch_reduce(inputs: list[Tensor], dtype: torch.dtype, unit: UnitPlan) -> list[Tensor]:
    """Start one reduce_scatter of all `inputs`; each result is `[numel / world_size]`, to be waited for."""
    if unit.world_size == 1 or not any(tensor.numel() for tensor in inputs):
        return inputs
    return reduce_scatter(inputs, division_of(unit, dtype).op, unit.world_size, unit.reducing_group)


def launch_all_reduce(launched: Sequence[Tensor], dtype: torch.dtype, unit: UnitPlan) -> list[Tensor]:
    """Wait for the results of `launch_reduce` and start one all_reduce of them over replicas, if the plan has it."""
    if not unit.averages_replicas or not any(tensor.numel() for tensor in launched):
        return list(launched)
    rule, shards = division_of(unit, dtype), _waited_for(launched, unit.world_size)
    if len(shards) == 1:
        return [_c10d.all_reduce(shards[0], rule.outer, unit.replicate_group)]
    return list(_c10d.all_reduce_coalesced(shards, rule.outer, unit.replicate_group))


def reduce_scatter(inputs: list[Tensor], op: str, world_size: int, group: str) -> list[Tensor]:
    """Launch `inputs`, all of one dtype, together."""
    if len(inputs) == 1:
        return [_c10d.reduce_scatter_tensor(inputs[0], op, world_size, group)]
    return list(_c10d.reduce_scatter_tensor_coalesced(inputs, op, world_size, group))


def reduced_in(launched: Sequence[Tensor], dtype: torch.dtype, unit: UnitPlan) -> list[Tensor]:
    """Wait for what was launched last, over the one axis or the other, and finish the mean."""
    is_last = unit.averages_replicas or unit.replicas == 1
    after = division_of(unit, dtype).after if is_last else 1
    done = _waited_for(launched, unit.num_ranks if unit.averages_replicas else unit.world_size)
    return [t / after if after != 1 else t for t in done]


def all_reduce_now(tensor: Tensor, rule: Division, group: str) -> Tensor:
    """Average over the replicas what a plan without their all_reduce has reduced, and finish the mean."""
    averaged: Tensor = _c10d.wait_tensor(_c10d.all_reduce(tensor, rule.outer, group))
    return averaged / rule.after if rule.after != 1 else averaged


def _waited_for(launched: Sequence[Tensor], num_ranks: int) -> list[Tensor]:
    """Wait for what was launched over so many ranks; one launches nothing."""
    return [_c10d.wait_tensor(tensor) if num_ranks > 1 and tensor.numel() else tensor for tensor in launched]


def shard_grads(reduced: Mapping[Segment, Tensor], plan: UnitPlan) -> dict[int, Tensor]:
    """Put reduced segments into their shards, in the dtype of gradients, with zeros where there is none."""
    pieces: dict[int, dict[int, tuple[Tensor, int]]] = {}  # shard -> first slot -> piece, number of slots
    for segment, tensor in reduced.items():
        runs = _runs(segment)
        numels = [sum(plan.shards[shard].slots[i].numel for shard, i in run) for run in runs]
        parts = torch.split(tensor, numels) if len(runs) > 1 else (tensor,)
        for run, part in zip(runs, parts, strict=True):
            pieces.setdefault(run[0][0], {})[run[0][1]] = (part, len(run))
    return {shard: _assembled(found, plan.shards[shard]) for shard, found in sorted(pieces.items())}


def _runs(segment: Segment) -> list[list[SlotIndex]]:
    """Cut a segment into runs of slots that follow each other in one shard."""
    runs = [[segment[0]]]
    for slot in segment[1:]:
        last = runs[-1][-1]
        if slot == (last[0], last[1] + 1):
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def _assembled(pieces: Mapping[int, tuple[Tensor, int]], shard: ShardPlan) -> Tensor:
    like, _ = next(iter(pieces.values()))
    parts, i = [], 0
    while i < len(shard.slots):
        piece, num_slots = pieces.get(i, (None, 1))
        if piece is None:
            piece = like.new_zeros(shard.slots[i].numel, dtype=shard.gradient_dtype)
        parts.append(piece.to(shard.gradient_dtype))
        i += num_slots
    return parts[0] if len(parts) == 1 else torch.cat(parts)
