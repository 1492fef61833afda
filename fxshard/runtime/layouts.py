"""What one variant of a forward saved, in the memory layout that a variant of its backward was compiled for.

[Note: layouts]
Inductor may lay out what it saves as it likes (channels last, for convolutions) and compiles the backward for that. Two
variants of one forward need not agree, and either may be followed by any variant of the backward, whose code checks the
strides of its inputs. So what comes in another order of dims is copied; where the two plain variants meet, torch has
seen to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxshard.ir.liveness import hint_of

Order = tuple[int, ...]
"""The dims of a tensor, those with the largest strides first."""


def orders_of(inputs: Sequence[Any]) -> dict[int, Order]:
    """The order that code compiled for `inputs` wants of each; nothing where any will do, or memory is shared."""
    found: dict[int, Order] = {}
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.dim() > 1:
            strides = [hint_of(stride) for stride in value.stride()]
            if all(strides):
                found[i] = tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))
    return found


def restride(inputs: list[Any], orders: dict[int, Order]) -> None:
    """Copy those of `inputs` that are in another order than is wanted."""
    for i, order in orders.items():
        value = inputs[i]
        strides = value.stride()
        wanted = [strides[dim] for dim in order if value.shape[dim] > 1]
        if wanted != sorted(wanted, reverse=True):
            inputs[i] = torch.empty_permuted(value.shape, order, dtype=value.dtype, device=value.device).copy_(value)
