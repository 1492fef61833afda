"""Which elements of a buffer a view shows: shape, strides and offset, without a tensor."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a buffer, as `Tensor.as_strided` takes them; a tensor would belong to a fake mode."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def is_contiguous(self) -> bool:
        """Return whether the elements lie one after another, as `Tensor.is_contiguous` has it."""
        apart = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != apart:
                return not self.numel
            apart *= size
        return True

    def contiguous(self) -> View:
        """Return itself, or the whole of a copy."""
        return self if self.is_contiguous() else whole(*self.shape)


def whole(*shape: int) -> View:
    """Return all of a contiguous buffer."""
    stride = tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
    return View(shape, stride)


@functools.lru_cache(maxsize=4096)  # a model has many equal layers, and running an op takes longer than looking it up
def moved(view: View, target: Any, args: tuple[Any, ...]) -> View | tuple[View, ...] | None:
    """Return what a view op makes of `view` on the meta device, `None` if that cannot be; `args` has no lists."""
    tensor = torch.empty(0, dtype=torch.int8, device="meta").as_strided(view.shape, view.stride, view.start)
    try:
        result = target(tensor, *(list(arg) if isinstance(arg, tuple) else arg for arg in args))
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None
    return _view_of(result) if isinstance(result, Tensor) else tuple(map(_view_of, result))


def _view_of(tensor: Tensor) -> View:
    return View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
