"""What a module keeps in its `__dict__` about each of its sharded parameters, so that its getters find them.

[Note: one guard per parameter]
Dynamo guards on everything that a traced getter reads, and evaluates the guards at every call. So beside the
`ParameterRef`, which eager reads use, stands the same in one string: a string is one guard, where a tuple of four
fields is eight. Taken apart while tracing, it gives constants.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

REFS = "_fxshard_refs"
"""Key in a module's `__dict__`: name of each sharded parameter -> `ParameterRef`."""

TRACED = "_fxshard_traced"
"""Key in a module's `__dict__`: name -> `ParameterRef.text`, `flat_key(name)` -> its flat; for tracing."""


class ParameterRef(NamedTuple):
    """All that reading a parameter needs."""

    flat: Tensor
    key: str
    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def text(self) -> str:
        """All but the flat: `2|128 384|float32|0 of 8@0 None/None keep 6b86b273`."""
        sizes = " ".join(map(str, self.shape))
        return f"{self.slot}|{sizes}|{str(self.dtype).removeprefix('torch.')}|{self.key}"


def publish(module: nn.Module, name: str, ref: ParameterRef) -> None:
    """Let the module's getter of `name` find the parameter."""
    module.__dict__.setdefault(REFS, {})[name] = ref
    module.__dict__.setdefault(TRACED, {}).update({name: ref.text, flat_key(name): ref.flat})


def flat_key(name: str) -> str:
    """Where a parameter's flat stands; no parameter can be called so."""
    return f"{name}.flat"


def marker_arguments(text: str) -> tuple[str, int, list[int], torch.dtype]:
    """The arguments of the `unshard` marker after the flat, out of a `ParameterRef.text`; Dynamo traces this."""
    slot, sizes, dtype, key = text.split("|", 3)
    return key, int(slot), [int(size) for size in sizes.split()], getattr(torch, dtype)
