"""The operators of our own; plain functions of a device, as in `checks.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from fxshard.ir import ops

DTYPES: Final[Mapping[torch.dtype, float]] = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Dtype of sums -> tolerance, relative to their size."""


def check_addmm_acc(device: str, dtype: torch.dtype, *, into: torch.dtype | None = None) -> None:
    """Add a product of two matrices, one of them transposed, to a sum, in place.

    Args:
        device: "cuda" or "cpu".
        dtype: of the matrices.
        into: of the sum; theirs by default.
    """
    into = into or dtype
    generator = torch.Generator().manual_seed(0)
    shapes = (65, 33), (17, 65), (17, 33)
    total, left, right = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    total, left, right = total.to(into), left.to(dtype).t(), right.to(dtype)
    before = total.clone()
    expected = before.double() + left.double() @ right.double()
    try:
        ops.ADDMM_ACC(total, left, right)
    except RuntimeError:
        torch.testing.assert_close(total, before, rtol=0.0, atol=0.0)
        raise
    torch.testing.assert_close(total.double(), expected, rtol=DTYPES[into], atol=20 * DTYPES[into])
