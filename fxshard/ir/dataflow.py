"""Follow shards, buffers and gradients through a graph: what each value is, in terms of the plan.

[Note: flow]
The verifier must know that `%layers_0_weight` really is the slot of `layers.0.weight` in what its launch gathered, and
that the gradient of `layers.0.bias` really ends up in its slot of the reduced shard. `dataflow_of` walks the graph once
and describes each value that comes from a flat or a gradient. It reads ops from their arguments, never from
`meta["val"]`, which a wrong pass may have left behind. Views are followed by shape, strides and offset (`strided.py`).

Forward   Flat -> (cast) -> InFlight -> wait -> Window -> views, copies -> Window tagged `param`
Backward  tagged `grad` -> GradientRow -> Concat -> (divide) -> InFlight -> wait -> Piece -> (divide, cast) -> Assembled
Replicas  Piece -> InFlight -> wait -> Piece, with the all_reduce
Offload   Flat -> InFlight -> wait -> Flat on the device; Assembled or Piece -> InFlight -> wait -> OnHost

A description stops at a node tagged `param` (what reads it is compute) and starts at a node tagged `grad`.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxshard.ir import collectives, ops, tags
from fxshard.ir.plan import FramePlan
from fxshard.ir.strided import View, moved, whole
from fxshard.ir.tags import NodeMeta

aten = torch.ops.aten


@dataclass(frozen=True)
class Flat:
    """Elements `start` to `start + numel` of a unit's shard, in the dtype to which it was cast."""

    unit: str
    shard: int
    dtype: torch.dtype
    start: int
    numel: int
    is_copy: bool = field(default=False, repr=False)  # on the device, of a shard that is on the host


@dataclass(frozen=True)
class InFlight:
    """What a launch returned and no wait has completed."""

    launch: fx.Node  # of the collective, or the copy between host and device
    index: int | None = 0  # which result of a coalesced launch
    copied: View | None = None  # the elements that a side stream copies, once they are there


@dataclass(frozen=True)
class Window:
    """Elements of a gathered buffer, `[world_size * flat.numel]`."""

    flat: Flat  # what was gathered
    view: View  # elements of the buffer, or of the copy of it
    copied: View | None = None  # the elements that were copied, if `view` is of a copy
    launch: fx.Node | None = None  # of the gather; one rank has none


@dataclass(frozen=True)
class GradientRow:
    """The gradient of one parameter on its way to a reduction: a sum of tagged nodes, cast, divided or reshaped."""

    terms: tuple[fx.Node, ...]
    dtype: torch.dtype
    view: View
    divisor: float = 1.0


@dataclass(frozen=True)
class Concat:
    """Rows side by side, `[world_size, n]`: the copy-in of a reduction."""

    rows: tuple[GradientRow, ...]
    world_size: int
    dtype: torch.dtype
    divisor: float = 1.0

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each row begins on one rank, and the end of the last."""
        return (0, *itertools.accumulate(row_numel(row, self.world_size) for row in self.rows))


@dataclass(frozen=True)
class Piece:
    """Elements of a reduced buffer, `[n]`; of the concat itself for one rank, which launches nothing."""

    concat: Concat
    launch: fx.Node | None
    view: View
    dtype: torch.dtype
    divisor: float = 1.0
    all_reduce: fx.Node | None = None  # of the whole buffer over the replicas


@dataclass(frozen=True)
class Zeros:
    """Where a shard has no gradient."""

    numel: int


@dataclass(frozen=True)
class Assembled:
    """The gradient of a shard, put together from pieces."""

    parts: tuple[Piece | Zeros, ...]


@dataclass(frozen=True)
class OnHost:
    """The copy of a shard's gradient on the host."""

    gradient: Piece | Assembled | GradientRow | Concat


Value = OnHost | Flat | InFlight | Window | GradientRow | Concat | Piece | Zeros | Assembled


@dataclass
class Dataflow:
    """What is known of a graph.

    Attributes:
        values: the description of each node that has one; several for an op with several results.
        parameters: node tagged `param` -> what it is made of, `None` if that could not be followed.
        unexpected_reads: (reader, what it reads): a flat, a buffer in flight or a gathered one, read as no pass does.
    """

    values: dict[fx.Node, Value | tuple[Value, ...]] = field(default_factory=dict)
    parameters: dict[fx.Node, Value | tuple[Value, ...] | None] = field(default_factory=dict)
    unexpected_reads: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    def sent_by(self, launch: fx.Node) -> list[Value | tuple[Value, ...] | None]:
        """Return what a launch sends, tensor by tensor, `None` where that could not be followed."""
        return [_sent(launch, i, self) for i in range(len(collectives.launch_inputs(launch)))]


def dataflow_of(graph: fx.Graph, plan: FramePlan) -> Dataflow:
    """Walk `graph` once; see [Note: flow]."""
    flow = Dataflow()
    for node in graph.nodes:
        meta = tags.meta_of(node)
        value = _describe(node, meta, flow, plan)
        if meta.param:
            flow.parameters[node] = value
            value = value if isinstance(value, Flat) else None
        if meta.grads:
            value = _leaf(node)
        if value is not None:
            flow.values[node] = value
    return flow


def _describe(node: fx.Node, meta: NodeMeta, flow: Dataflow, plan: FramePlan) -> Value | tuple[Value, ...] | None:
    if node.op == "placeholder" and meta.shard is not None:
        found = plan.units[meta.shard.unit].shards[meta.shard.number]
        return Flat(*meta.shard, found.dtype, 0, found.numel)
    known = [n for n in node.all_input_nodes if n in flow.values]
    rule = _RULES.get(node.target) if node.op == "call_function" else None
    value = rule(node, flow, plan) if rule is not None and (known or node.target in _ZEROS) else None
    if value is None:
        flow.unexpected_reads += [(node, n) for n in known if _must_be_followed(n, node, flow)]
    return value


def _must_be_followed(node: fx.Node, reader: fx.Node, flow: Dataflow) -> bool:
    """Return whether only a known op may read `node`; compute may read gradients and parameters freely."""
    value = flow.values[node]
    if isinstance(value, Flat):
        return node not in flow.parameters and reader.op != "output"  # a flat may be saved: it is there anyway
    return isinstance(value, InFlight | Window) or (isinstance(value, tuple) and isinstance(value[0], Window))


def _leaf(node: fx.Node) -> GradientRow | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(n, int) for n in value.shape):
        return None
    return GradientRow((node,), value.dtype, whole(*value.shape))


def _input(node: fx.Node, flow: Dataflow, at: int = 0) -> Value | tuple[Value, ...] | None:
    argument = node.args[at] if len(node.args) > at else None
    return flow.values.get(argument) if isinstance(argument, fx.Node) else None


def _moved(node: fx.Node, view: View) -> View | tuple[View, ...] | None:
    """Return what the op of `node` makes of `view`; `None` if that is unknown or it reads other tensors too."""
    if len(node.all_input_nodes) != 1:
        return None
    return moved(view, node.target, tuple(tuple(arg) if isinstance(arg, list) else arg for arg in node.args[1:]))


def _view(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | tuple[Value, ...] | None:
    value = _aswhole(_input(node, flow), node, plan)
    if isinstance(value, Concat):
        return _view_of_concat(node, value)
    if isinstance(value, Flat):
        part = _moved(node, whole(value.numel))
        if not isinstance(part, View) or len(part.shape) != 1 or not part.is_contiguous():
            return None
        return replace(value, start=value.start + part.start, numel=part.numel)
    if not isinstance(value, Window | GradientRow | Piece):
        return None
    found = _moved(node, value.view)
    if isinstance(found, View):
        return replace(value, view=found)
    return tuple(replace(value, view=part) for part in found) if found is not None else None


def _aswhole(value: Any, node: fx.Node, plan: FramePlan) -> Any:
    """Take a flat that one rank holds alone for the gathered buffer."""
    if isinstance(value, Flat) and plan.units[value.unit].world_size == 1:
        return Window(value, whole(value.numel))
    return value


def _view_of_concat(node: fx.Node, concat: Concat) -> Value | tuple[Value, ...] | None:
    """Follow a view: flattened, a concat stays the same; cut in pieces, it is the reduced buffer of one rank."""
    numel = sum(row_numel(row, concat.world_size) for row in concat.rows)
    found = _moved(node, whole(numel * concat.world_size))
    if isinstance(found, View):
        flattened = found.numel == numel * concat.world_size and found.is_contiguous()
        return concat if flattened else Piece(concat, None, found, concat.dtype)
    return tuple(Piece(concat, None, part, concat.dtype) for part in found) if found is not None else None


def _copy(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    value = _aswhole(_input(node, flow), node, plan)
    if isinstance(value, GradientRow | Piece):
        return replace(value, view=value.view.contiguous())
    if isinstance(value, Concat):
        return value
    if not isinstance(value, Window) or (value.copied is not None and not value.view.is_contiguous()):
        return None
    if value.copied is not None:
        return value
    return replace(value, view=whole(*value.view.shape), copied=value.view)


def _cast(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    value = _input(node, flow)
    if (
        isinstance(value, Window)
        and node.target is ops.COPY
        and ops.cast_dtype(node, value.flat.dtype) == value.flat.dtype
    ):
        return _copy(node, flow, plan)
    if isinstance(value, Flat | GradientRow | Concat | Piece):
        return replace(value, dtype=ops.cast_dtype(node, value.dtype))
    return None


def _resize(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    value = _input(node, flow)
    found = _moved(node, value.view) if isinstance(value, GradientRow) else None
    return replace(value, view=found) if isinstance(value, GradientRow) and isinstance(found, View) else None


def _add(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    left, right = _input(node, flow, 0), _input(node, flow, 1)
    if not isinstance(left, GradientRow) or not isinstance(right, GradientRow) or node.kwargs:
        return None
    if left.view.shape != right.view.shape or left.divisor != 1 or right.divisor != 1:
        return None
    return GradientRow((*left.terms, *right.terms), torch.promote_types(left.dtype, right.dtype), left.view)


def _divide(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    value, divisor = _input(node, flow), node.args[1]
    if not isinstance(value, GradientRow | Concat | Piece) or not isinstance(divisor, int | float) or node.kwargs:
        return None
    return replace(value, divisor=value.divisor * divisor)


def _multiply(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    value, factor = _input(node, flow), node.args[1]
    if not isinstance(value, GradientRow | Concat | Piece) or not isinstance(factor, int | float) or not factor:
        return None
    return replace(value, divisor=value.divisor / factor)


def _concat(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    """Follow `_chunk_cat(rows, 0, world_size)`, its decomposition `cat(rows, 1)`, or `cat` of reduced pieces."""
    # Rows are copied: one node may be the gradient of two parameters, and each has a row of its own.
    (members, *rest) = node.args
    listed = members if isinstance(members, list | tuple) else ()
    parts = [flow.values.get(m) if isinstance(m, fx.Node) else None for m in listed]
    if node.target is aten._chunk_cat.default:
        rows = tuple(replace(part) for part in parts if isinstance(part, GradientRow) and part.divisor == 1)
        fits = len(rows) == len(parts) and len(rest) == 2 and rest[0] == 0 and isinstance(rest[1], int)
        return Concat(rows, rest[1], rows[0].dtype) if rows and fits else None  # type: ignore[arg-type]
    rows = tuple(
        replace(part)
        for part in parts
        if isinstance(part, GradientRow) and len(part.view.shape) == 2 and part.divisor == 1
    )
    if rows and len(rows) == len(parts) and list(rest) in ([1], [-1]):
        return Concat(rows, rows[0].view.shape[0], rows[0].dtype)
    if all(unit.world_size == 1 for unit in plan.units.values()):
        parts = [on_one_rank(part) for part in parts]
    pieces = tuple(part for part in parts if isinstance(part, Piece | Zeros))
    return Assembled(pieces) if pieces and len(pieces) == len(parts) and list(rest) in ([], [0]) else None


def _copy_in(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    members, world_size, dtype = node.args
    if not isinstance(members, list | tuple) or not isinstance(world_size, int) or not isinstance(dtype, torch.dtype):
        return None
    parts = [flow.values.get(member) if isinstance(member, fx.Node) else None for member in members]
    rows = tuple(replace(part, dtype=dtype) for part in parts if isinstance(part, GradientRow) and part.divisor == 1)
    return Concat(rows, world_size, dtype) if rows and len(rows) == len(parts) else None


def _getitem(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    value, index = _input(node, flow), node.args[1]
    if isinstance(value, InFlight) and value.index is None and isinstance(index, int):
        return InFlight(value.launch, index)
    known = isinstance(value, tuple) and isinstance(index, int) and -len(value) <= index < len(value)
    return value[index] if known else None  # type: ignore[index]


def _launch(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    is_ours = plan.has_group(collectives.group_of(node)) and node.target not in collectives.ALL_REDUCES
    if not tags.meta_of(node).calls and not is_ours:
        return None  # the model's own
    return InFlight(node, None if node.target in collectives.COALESCED else 0)


def _sent(launch: fx.Node, index: int, flow: Dataflow) -> Value | tuple[Value, ...] | None:
    source, part = collectives.launch_input(launch, index), collectives.sent_part(launch, index)
    value = flow.values.get(source) if source is not None else None
    if isinstance(value, OnHost):
        return None  # no collective of ours sends it
    if part is not None:
        value = replace(value, start=value.start + part[0], numel=part[1]) if isinstance(value, Flat) else None
    dtype = collectives.sent_dtype(launch)
    if dtype is None:
        return value
    return replace(value, dtype=dtype) if isinstance(value, Flat | GradientRow | Concat) else None


def _copy_out(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    value = _input(node, flow)
    if not isinstance(value, InFlight) or value.index is None or value.copied is not None:
        return None
    _, size, stride, start, _ = node.args
    return replace(value, copied=View(tuple(size), tuple(stride), start))  # type: ignore[arg-type]


def _copy_between(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    value = _input(node, flow)
    if node.target is ops.COPY_TO_DEVICE:
        is_flat = isinstance(value, Flat) and not value.is_copy and tags.meta_of(node.all_input_nodes[0]).shard
        return InFlight(node) if is_flat else None
    return InFlight(node) if isinstance(value, Piece | Assembled | GradientRow | Concat) else None


def _wait(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    value = _input(node, flow)
    if not isinstance(value, InFlight) or value.index is None:
        return None
    sent = _sent(value.launch, value.index, flow)
    if value.launch.target is ops.COPY_TO_DEVICE:
        return replace(sent, is_copy=True) if isinstance(sent, Flat) else None
    if value.launch.target is ops.COPY_TO_HOST:
        return OnHost(sent) if isinstance(sent, Piece | Assembled | GradientRow | Concat) else None
    if value.launch.target in collectives.ALL_REDUCES:
        reduced = _all_reduced(on_one_rank(sent), value.launch)
        return replace(reduced, dtype=ops.cast_dtype(node, reduced.dtype)) if isinstance(reduced, Piece) else None
    if isinstance(sent, Flat):
        gathered = whole(sent.numel * collectives.world_size_of(value.launch))
        if value.copied is not None:
            return Window(sent, whole(*value.copied.shape), copied=value.copied, launch=value.launch)
        return Window(sent, gathered, launch=value.launch)
    if isinstance(sent, GradientRow):
        sent = alone(sent, collectives.world_size_of(value.launch))
    if isinstance(sent, Concat):
        numel = sum(row_numel(row, sent.world_size) for row in sent.rows)
        return Piece(sent, value.launch, whole(numel), ops.cast_dtype(node, sent.dtype))
    return None


def _all_reduced(sent: Value | tuple[Value, ...] | None, launch: fx.Node) -> Value | None:
    """Follow a reduced buffer over the replicas, whole and once."""
    if not isinstance(sent, Piece) or sent.all_reduce is not None:
        return None
    numel = sum(row_numel(row, sent.concat.world_size) for row in sent.concat.rows)
    is_whole = sent.view.is_contiguous() and (sent.view.start, sent.view.numel) == (0, numel)
    return replace(sent, all_reduce=launch) if is_whole else None


def _zeros(node: fx.Node, flow: Dataflow, plan: FramePlan) -> Value | None:
    fills = [a for a in node.args[1:] if isinstance(a, int | float)] if node.target is aten.full.default else []
    sizes = node.args[1] if node.target is aten.new_zeros.default else node.args[0]
    sizes = sizes if isinstance(sizes, list | tuple) else [sizes]
    numel = math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None
    return None if any(fills) or numel is None else Zeros(numel)


def on_one_rank(value: Value | tuple[Value, ...] | None) -> Value | tuple[Value, ...] | None:
    """Take what one rank has put together for the reduced buffer; leave anything else."""
    if isinstance(value, GradientRow):
        value = alone(value, 1)
    if not isinstance(value, Concat) or value.world_size != 1:
        return value
    return Piece(value, None, whole(sum(row_numel(row, 1) for row in value.rows)), value.dtype)


def alone(row: GradientRow, world_size: int) -> Concat:
    """Return what a single gradient is for a reduction: it needs no concat."""
    return Concat((row,), world_size, row.dtype, row.divisor)


def row_numel(row: GradientRow, world_size: int) -> int:
    """Return the elements of a row on one rank: `ceil(rows / world_size)` rows, as `_chunk_cat` pads them."""
    first = row.view.shape[0] if row.view.shape else 1
    return -(-first // world_size) * math.prod(row.view.shape[1:])


Rule = Callable[[fx.Node, Dataflow, FramePlan], "Value | tuple[Value, ...] | None"]


def _rules() -> dict[Any, Rule]:
    table: tuple[tuple[Iterable[Any], Rule], ...] = (
        (ops.VIEWS, _view),
        (ops.COPIES, _copy),
        (ops.CASTS | {ops.COPY}, _cast),
        ((aten.expand.default, aten.constant_pad_nd.default), _resize),
        ((aten.add.Tensor,), _add),
        ((aten.div.Tensor, aten.div.Scalar), _divide),
        ((aten.mul.Tensor, aten.mul.Scalar), _multiply),
        ((aten._chunk_cat.default, aten.cat.default), _concat),
        ((ops.COPY_IN,), _copy_in),
        ((operator.getitem,), _getitem),
        (collectives.LAUNCHES, _launch),
        (collectives.WAITS, _wait),
        ((ops.COPY_OUT,), _copy_out),
        (ops.BETWEEN_HOST_AND_DEVICE, _copy_between),
        (_ZEROS, _zeros),
    )
    return {target: rule for targets, rule in table for target in targets}


_ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.full.default)
_RULES = _rules()
