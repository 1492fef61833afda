"""The operators of our own, on CUDA."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.gpu.ops import DTYPES, check_addmm_acc

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adds_a_product(dtype: torch.dtype) -> None:
    check_addmm_acc("cuda", dtype)


def test_adds_products_in_bf16_to_sums_in_fp32_rightly_or_not_at_all() -> None:
    with contextlib.suppress(RuntimeError):  # torch has no such product: the check has seen that the sum is as it was
        check_addmm_acc("cuda", torch.bfloat16, into=torch.float32)
