"""The op that stands for a block in the graphs of what is around the blocks; [Note: outlined traces]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx


@torch.library.custom_op("fxshard::planned_block", mutates_args=())
def planned_block(tensors: Sequence[Tensor], number: int, results: str) -> list[Tensor]:
    """Stand for block `number`, whose results are as the text says: `bfloat16 2 8 16;float32 2`, dtype and sizes.

    Backward is the same op the other way around, of block `~number`.
    """
    raise NotImplementedError("fxshard::planned_block stands for a block in a plan, and has no kernel")


@planned_block.register_fake
def _(tensors: Sequence[Tensor], number: int, results: str) -> list[Tensor]:
    made = []
    for text in results.split(";"):
        dtype, *sizes = text.split(" ")
        made.append(tensors[0].new_empty([int(size) for size in sizes], dtype=getattr(torch, dtype)))
    return made


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.number, ctx.differentiable = inputs[1], [t.is_floating_point() for t in inputs[0]]
    ctx.sources = text_of([t for t in inputs[0] if t.is_floating_point()])


def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    made = iter(planned_block([g for g in grads if g is not None], ~ctx.number, ctx.sources))
    return [next(made) if each else None for each in ctx.differentiable], None, None


torch.library.register_autograd("fxshard::planned_block", _backward, setup_context=_keep)


def text_of(tensors: Sequence[Tensor]) -> str:
    """Describe tensors as `planned_block` reads it."""
    return ";".join(" ".join((str(t.dtype).removeprefix("torch."), *map(str, t.shape))) for t in tensors)


def number_of(node: fx.Node) -> int | None:
    """The number of the block that a node stands for, `None` for other nodes."""
    if node.target is not torch.ops.fxshard.planned_block.default:
        return None
    number = cast(int, node.args[1])
    return max(number, ~number)


def is_backward(node: fx.Node) -> bool:
    """Whether a node that stands for a block stands for its backward: a graph may call it again before."""
    return cast(int, node.args[1]) < 0
