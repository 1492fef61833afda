"""Views without tensors: the same shapes, strides and offsets as torch's own."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fxshard.ir.strided import View, moved, whole

aten = torch.ops.aten

VIEWS = [
    torch.empty(3, 4),
    torch.empty(3, 4).t(),
    torch.empty(3, 1, 4)[:, :, 1:2],
    torch.empty(1, 4)[:, 2:],
    torch.empty(2, 0, 3),
    torch.empty(()),
    torch.empty(2).expand(3, 2),
]


def view_of(tensor: Tensor) -> View:
    return View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@pytest.mark.parametrize("tensor", VIEWS, ids=lambda tensor: str(view_of(tensor)))
def test_knows_what_torch_knows(tensor: Tensor) -> None:
    view = view_of(tensor)
    assert view.numel == tensor.numel()
    assert view.is_contiguous() == tensor.is_contiguous()
    assert view.contiguous() == view_of(tensor.contiguous())
    assert whole(*tensor.shape) == view_of(torch.empty(tensor.shape))


@pytest.mark.parametrize("fake", [False, True])
def test_moves_as_the_op_does(fake: bool) -> None:
    moved.cache_clear()
    with FakeTensorMode() if fake else nullcontext():
        assert moved(whole(12), aten.view.default, ((3, 4),)) == whole(3, 4)
    assert moved(whole(3, 4), aten.slice.Tensor, (1, 1, 3)) == View((3, 2), (4, 1), 1)
    assert moved(whole(6), aten.split_with_sizes.default, ((2, 4),)) == (View((2,), (1,)), View((4,), (1,), 2))


def test_says_where_an_op_cannot_be() -> None:
    assert moved(whole(12), aten.view.default, ((5, 4),)) is None
    assert moved(whole(12), aten.slice.Tensor, (3, 1, 3)) is None
