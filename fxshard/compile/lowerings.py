"""How Inductor lowers the ops of `fxshard::` that run on side streams: as collectives, whose results are waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import ir as inductor_ir
from torch._inductor import lowering

from fxshard.ir import ops


def _as_collective(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """What Inductor makes of an op whose result is waited for: it keeps what the op reads until the wait.

    Of an op that takes and gives lists, the wait for a result keeps the input of the same index; of one that gives a
    tensor, the wait keeps the first input, so it takes no other.
    """

    def lower(*args: Any) -> Any:
        made = inductor_ir._CollectiveKernel.create_out_of_place(op, *args)
        if isinstance(made, list):
            return [inductor_ir.TensorBox.create(tensor) for tensor in made]
        return inductor_ir.TensorBox.create(made)

    return lower


for _op in (ops.ALL_GATHER_ON_STREAM, ops.REDUCE_SCATTER_ON_STREAM, ops.COPY_OUT):
    lowering.add_layout_constraint(_op, lowering.constrain_to_fx_strides)
    lowering.register_lowering(_op, type_promotion_kind=None)(_as_collective(_op))
