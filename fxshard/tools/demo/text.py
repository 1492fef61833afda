"""Real text that is on every machine: the Python sources of the standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fxshard.errors import ConfigError

VOCAB_SIZE: Final = 256
_ENOUGH_BYTES: Final = 4 << 20


def read_corpus(min_bytes: int, folder: Path | None = None) -> Tensor:
    """Return the sources in `folder`, by default the standard library's, as uint8 `[num_bytes]`, at least so many."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for source in sorted(folder.glob("*.py")):
        if len(text) < _ENOUGH_BYTES:
            text += source.read_bytes()
    if len(text) < min_bytes:
        raise ConfigError(f"the Python sources in {folder} are {len(text)} bytes of text, need at least {min_bytes}.")
    return torch.from_numpy(np.frombuffer(bytes(text), dtype=np.uint8).copy())


def global_batch(corpus: Tensor, *, step: int, seed: int, num_rows: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return int64 tokens `[num_rows, seq_len]` of one step and, for each, the token that follows it.

    Of `num_rows = world_size * batch_size` rows, rank r trains on `[r * batch_size, (r + 1) * batch_size)`; the
    unsharded model trains on all. They are a function of the arguments alone.
    """
    generator = torch.Generator().manual_seed(((seed << 24) + step) % (1 << 63))
    starts = torch.randint(len(corpus) - seq_len, (num_rows, 1), generator=generator)
    windows = corpus[starts + torch.arange(seq_len + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
