"""Compare values across ranks without a collective, so that ranks in different places get an error, not a hang."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from fxshard.errors import ConfigError
from fxshard.runtime.agreement import is_in_process
from fxshard.runtime.raw import as_bytes


def checksum(tensors: Iterable[Tensor]) -> int:
    """CRC32 over the bytes of all tensors, in order."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(as_bytes(tensor.cpu()).numpy(), crc)  # type: ignore[arg-type] # a numpy array is a buffer
    return crc


def gather_texts(
    topic: str,
    text: str,
    group: dist.ProcessGroup,
    timeout: timedelta = timedelta(minutes=5),
    remedy: str = "All ranks must make the first call of the compiled model.",
) -> list[str]:
    """Every rank's text, in group order, through the store of the default process group.

    Where no other process can reach the store, the other ranks are emulated and say the same.

    Args:
        topic: what is compared; the n-th exchange of a rank on a topic meets the n-th of the others.
        text: this rank's.
        group: the ranks that compare.
        timeout: how long to wait for the other ranks.
        remedy: what the error says to do.

    Raises:
        ConfigError: some ranks never came; they are named.
    """
    store, rank, ranks = _get_default_store(), dist.get_rank(), dist.get_process_group_ranks(group)
    if is_in_process(store):
        return [text] * len(ranks)
    place = f"fxshard/{topic}/{group.group_name}"
    ordinal = store.add(f"{place}/ordinal/{rank}", 1)
    keys = {r: f"{place}/{ordinal}/{r}" for r in ranks}
    store.set(keys[rank], text)
    try:
        store.wait(list(keys.values()), timeout)
    except RuntimeError as error:
        absent = [str(r) for r, key in keys.items() if not store.check([key])]
        raise ConfigError(f"{topic}: rank {rank} waited {timeout} for rank {', '.join(absent)}. {remedy}") from error
    return [store.get(key).decode() for key in keys.values()]
