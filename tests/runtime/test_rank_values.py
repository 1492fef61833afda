"""Comparing texts across ranks: agreement, difference, and a rank that never comes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fxshard.errors import ConfigError
from fxshard.runtime.rank_values import checksum, gather_texts
from tests.ranks import two_ranks


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@two_ranks
def test_every_rank_sees_the_texts_of_all_in_rank_order() -> None:
    for exchange in ("first", "second"):
        texts = gather_texts("order", f"{exchange} of {dist.get_rank()}", world())
        assert texts == [f"{exchange} of 0", f"{exchange} of 1"]


@two_ranks
def test_names_the_rank_that_never_comes() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(ConfigError, match=r"(?s)late: rank 0 waited .* for rank 1\. All ranks must"):
            gather_texts("late", "here", world(), timeout=timedelta(seconds=1))


def test_a_checksum_sees_one_changed_bit_of_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensors = [torch.zeros(3, 2, dtype=dtype), torch.ones((), dtype=dtype)]
        before = checksum(tensors)
        assert checksum([t.clone() for t in tensors]) == before
        tensors[0][1, 1] = 1
        assert checksum(tensors) != before
