"""Whether what the dataflow found in a graph lies where the plan says."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

from torch import fx

from fxshard.ir import collectives, dataflow
from fxshard.ir.dataflow import Concat, Flat, GradientRow, Piece, Window, Zeros
from fxshard.ir.plan import ShardPlan, Slot, UnitPlan
from fxshard.ir.strided import View, whole
from fxshard.torch_private import REDUCES_IN_STORAGE_DTYPE


def is_slot(value: Flat | Window, unit: str, shard: int, slot: Slot, plan: UnitPlan) -> bool:
    """Return whether `value` is the unsharded parameter of `slot`: every rank's columns, row after row, no padding."""
    if isinstance(value, Flat):  # one rank, and the parameter is all there is
        value = Window(value, whole(value.numel))
    if (value.flat.unit, value.flat.shard) != (unit, shard) or value.view.shape != slot.shape:
        return False
    if not slot.full_numel:
        return True
    if not value.view.is_contiguous():
        return False
    if value.copied is not None:
        return value.view.start == 0 and _is_block(value.copied, slot, value.flat, plan.world_size)
    # Without a copy only what is contiguous in the buffer can be the parameter.
    in_one_piece = plan.world_size == 1 or slot.numel == value.flat.numel or slot.full_numel <= slot.numel
    return in_one_piece and value.view.start == slot.offset - value.flat.start


def _is_block(copied: View, slot: Slot, flat: Flat, world_size: int) -> bool:
    """Return whether a copy took the slot's columns of what was gathered, `[world_size, flat.numel]`."""
    rows_apart = world_size == 1 or copied.stride[:1] == (flat.numel,)
    return (
        copied.shape == (world_size, slot.numel)
        and copied.start == slot.offset - flat.start
        and rows_apart
        and (slot.numel <= 1 or copied.stride[1] == 1)
    )


class ShardGradient:
    """What the gradient of one shard is made of, piece after piece."""

    def __init__(self, pieces: Sequence[Piece | Zeros]) -> None:
        self.pieces = tuple(pieces)  # reduced buffers, and zeros where there is no gradient
        sizes = [piece.numel if isinstance(piece, Zeros) else piece.view.numel for piece in self.pieces]
        self._starts = [0, *itertools.accumulate(sizes)]
        self._rows: dict[tuple[int, int], tuple[GradientRow, Piece]] = {}
        for start, numel, piece in zip(self._starts, sizes, self.pieces, strict=False):
            if isinstance(piece, Piece) and piece.view.is_contiguous():
                for offset, row, size in _rows_of(piece, numel):
                    self._rows.setdefault((start + offset, size), (row, piece))

    @property
    def rows(self) -> list[GradientRow]:
        """The gradients that lie whole in it."""
        return [row for row, _ in self._rows.values()]

    def at(self, slot: Slot) -> tuple[GradientRow, Piece] | tuple[None, None]:
        """Return the gradient that lies in `slot`, `None` if no single one does, and the reduced buffer that has it."""
        return self._rows.get((slot.offset, slot.numel), (None, None))

    def is_zero(self, slot: Slot) -> bool:
        """Return whether `slot` has no gradient."""
        first = bisect.bisect_right(self._starts, slot.offset) - 1
        last = bisect.bisect_left(self._starts, slot.offset + slot.numel)
        overlapping = self.pieces[first:last]
        return bool(overlapping) and all(isinstance(piece, Zeros) for piece in overlapping)


def gradient_of_shard(value: dataflow.Value | None) -> ShardGradient | None:
    """Return what a shard's gradient is made of; `None` if it is something else."""
    found = dataflow.on_one_rank(value.gradient if isinstance(value, dataflow.OnHost) else value)
    pieces = found.parts if isinstance(found, dataflow.Assembled) else (found,)
    known = [piece for piece in pieces if isinstance(piece, Piece | Zeros)]
    return ShardGradient(known) if len(known) == len(pieces) else None


def _rows_of(piece: Piece, numel: int) -> Iterator[tuple[int, GradientRow, int]]:
    """Yield the gradients that lie whole in a piece: where they begin in it, they, and their size on one rank."""
    rows, starts = piece.concat.rows, piece.concat.starts
    for i in range(bisect.bisect_left(starts, piece.view.start), len(rows)):
        offset, size = starts[i] - piece.view.start, starts[i + 1] - starts[i]
        if offset >= numel:
            return
        if offset + size <= numel:
            yield offset, rows[i], size


def sent_by(launch: fx.Node, found: dataflow.Dataflow) -> list[Concat | None]:
    """Return what a reduction sends, tensor by tensor."""
    size = collectives.world_size_of(launch)
    single = [dataflow.alone(v, size) if isinstance(v, GradientRow) else v for v in found.sent_by(launch)]
    return [value if isinstance(value, Concat) else None for value in single]


def wrong_ranks(launch: fx.Node, unit: UnitPlan) -> Iterator[str]:
    """Say how a launch addresses other ranks than those that share the unit."""
    group = unit.reducing_group if launch.target in collectives.REDUCTIONS else unit.gathering_group
    if collectives.group_of(launch) != group:
        yield f"expected group {group!r}, found {collectives.group_of(launch)!r}"
    if collectives.world_size_of(launch) != unit.world_size:
        yield f"{unit.world_size} ranks share the unit, the launch says {collectives.world_size_of(launch)}"


def wrong_reduction(launch: fx.Node, sent: Concat, row: GradientRow, unit: UnitPlan, shard: ShardPlan) -> Iterator[str]:
    """Say how a launch reduces a gradient otherwise than planned."""
    default = shard.gradient_dtype if REDUCES_IN_STORAGE_DTYPE or shard.grad_dtype else collectives.sum_dtype(row.terms)
    expected = unit.reduce_dtype or default
    rule = collectives.division_of(unit, expected)
    if sent.dtype is not expected:
        yield f"expected a reduction in {expected}, found {sent.dtype}"
    operator = collectives.arguments_of(launch)["reduce_op"]
    if operator != rule.op:
        yield f"expected operator {rule.op!r}, found {operator!r}"
    if sent.divisor != rule.before:
        yield f"expected division by {rule.before:g} before the reduction, found {sent.divisor:g}"


def wrong_all_reduce(piece: Piece, unit: UnitPlan) -> Iterator[str]:
    """Say how a reduced gradient is averaged over replicas otherwise than planned."""
    launch, rule = piece.all_reduce, collectives.division_of(unit, piece.concat.dtype)
    if launch is None:
        if unit.averages_replicas:
            yield f"no all_reduce averages it over the {unit.replicas} replicas"
        return
    if not unit.averages_replicas:
        yield "its unit is not averaged over replicas here"
    elif collectives.group_of(launch) != unit.replicate_group:
        yield f"expected group {unit.replicate_group!r}, found {collectives.group_of(launch)!r}"
    operator = collectives.arguments_of(launch)["reduce_op"]
    if operator != rule.outer:
        yield f"expected operator {rule.outer!r}, found {operator!r}"
    if piece.launch is None and piece.concat.divisor != rule.before:
        yield f"expected division by {rule.before:g} before the all_reduce, found {piece.concat.divisor:g}"


def wrong_result(piece: Piece, unit: UnitPlan, shard: ShardPlan) -> Iterator[str]:
    """Say how a reduced gradient is finished otherwise than planned."""
    rule = collectives.division_of(unit, piece.concat.dtype)
    is_sent = piece.launch or piece.all_reduce
    last = rule.after if unit.averages_replicas or unit.replicas == 1 else 1
    after = last if is_sent else rule.before * last
    found = piece.divisor if is_sent else piece.divisor * piece.concat.divisor
    if piece.launch is None and unit.world_size > 1:
        yield "no launch reduced it: it is this rank's own gradient"
    if found != after:
        yield f"expected division by {after:g} after the reduction, found {found:g}"
    if piece.dtype is not shard.gradient_dtype:
        yield f"expected the gradient in {shard.gradient_dtype}, found {piece.dtype}"
