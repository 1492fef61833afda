"""Tensors as bytes: to be sent, hashed, written and compared, whatever their dtype and strides."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, `[nbytes]` of uint8, in order; its own memory if it is contiguous, else a copy's."""
    whole = tensor.detach().contiguous()
    # What has one element is contiguous with any stride; `view` takes none but 1.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def checksum(tensors: Iterable[Tensor]) -> int:
    """CRC32 over the bytes of all tensors, in order."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(as_bytes(tensor.cpu()).numpy(), crc)  # type: ignore[arg-type] # a numpy array is a buffer
    return crc
