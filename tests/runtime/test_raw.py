"""Tensors as bytes."""

from __future__ import annotations

import pytest
import torch

from fxshard.runtime.raw import as_bytes, checksum
from fxshard.state.serializable import same_bits

STRIDED = {
    "one dimension": torch.arange(8.0)[::2],
    "transposed": torch.arange(6).view(2, 3).t(),
    "one element with an odd stride": torch.arange(5.0).as_strided((1,), (5,)),
    "no dimension": torch.tensor(True),
    "no element": torch.empty(0, 3),
}


@pytest.mark.parametrize("name", STRIDED)
def test_bytes_are_those_of_a_contiguous_copy(name: str) -> None:
    tensor = STRIDED[name]
    copy = torch.tensor(tensor.tolist(), dtype=tensor.dtype).view(tensor.shape)
    assert bytes(as_bytes(tensor).tolist()) == copy.numpy().tobytes()
    assert same_bits(tensor, copy)
    assert checksum([tensor]) == checksum([copy])


def test_bytes_of_what_is_contiguous_are_its_own_memory() -> None:
    for tensor in (torch.ones(3, 4), torch.ones(2)[::2], torch.tensor(1.0)):
        as_bytes(tensor).zero_()
        assert not tensor.any()


def test_a_checksum_sees_one_changed_bit_of_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensors = [torch.zeros(3, 2, dtype=dtype), torch.ones((), dtype=dtype)]
        before = checksum(tensors)
        assert checksum([t.clone() for t in tensors]) == before
        tensors[0][1, 1] = 1
        assert checksum(tensors) != before
