"""How a backward wants what it reads: [Note: layouts] in `runtime/dispatch.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from fxshard.runtime.dispatch import layouts_of, restride


def restrided(value: Tensor, compiled_for: Tensor) -> Tensor:
    inputs = [value]
    restride(inputs, layouts_of([compiled_for]))
    assert torch.equal(inputs[0], value)
    return inputs[0]


def padded(rows: int, width: int, stride: int) -> Tensor:
    return torch.arange(float(rows * stride)).view(rows, stride)[:, :width]


def test_copies_what_is_padded_otherwise() -> None:
    dense = torch.arange(15.0).view(3, 5)
    assert restrided(padded(3, 5, 8), dense).stride() == (5, 1)
    assert restrided(dense, padded(3, 5, 8)).stride() == (8, 1)
    assert restrided(dense.t().contiguous().t(), dense).stride() == (5, 1)


def test_copies_nothing_that_lies_as_it_should() -> None:
    for value in (padded(3, 5, 8), torch.arange(15.0).view(3, 5).t(), torch.ones(4)):
        assert restrided(value, value) is value


def test_does_not_look_at_the_stride_of_one_row() -> None:
    row = padded(1, 5, 8)
    assert restrided(row, torch.ones(1, 5)) is row


def test_leaves_shared_memory_alone() -> None:
    value = torch.ones(3, 5)
    assert restrided(value, torch.ones(1, 5).expand(3, 5)) is value
