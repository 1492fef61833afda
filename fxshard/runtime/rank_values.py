"""What every rank says, told to all of them through the store: for values that may differ between ranks."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.runtime.raw import as_bytes

EMULATED = "emulated"
"""Name in torch.distributed of the backend whose other ranks are emulated."""


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
    store, rank, ranks = torch_private.default_store(), dist.get_rank(), dist.get_process_group_ranks(group)
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


def first_difference(
    ours: Iterable[str], theirs: Iterable[str], nothing: str = "nothing", key: Callable[[str], str] = str
) -> tuple[int, str, str] | None:
    """Number, from 1, and texts of the first line in which two ranks differ; `key` gives what is compared of a line."""
    pairs = enumerate(itertools.zip_longest(ours, theirs, fillvalue=nothing), 1)
    return next(((i, *pair) for i, pair in pairs if key(pair[0]) != key(pair[1])), None)


def is_in_process(store: dist.Store) -> bool:
    """Whether no other process can reach the store: the other ranks are emulated."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.HashStore)
