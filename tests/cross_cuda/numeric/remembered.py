"""Launches that were computed before: most orders and faults of a case give most kernels the same bits again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.cross_cuda.numeric import interpreter

_MOST_BYTES = 1 << 29

Launch = Callable[[Any, Sequence[Any]], None]
"""Runs a kernel of Inductor's on its arguments."""


class Remembered:
    """Runs kernels as `interpreter.launch` does; what was given the same bits once before gets the results of then.

    All bytes of an argument's memory count, those that are only written too, so nothing is assumed of a kernel but
    that it draws nothing.
    """

    def __init__(self) -> None:
        self._results: OrderedDict[Any, list[Tensor | None]] = OrderedDict()
        self._num_bytes = 0

    def __call__(self, kernel: Any, args: Sequence[Any]) -> None:
        """Run a kernel, or write what it has written."""
        memory = _memory_of(args)
        bits = list(map(_digest, memory.values()))
        key = (kernel, *map(_described, args), *(list(memory).index(_address(a)) for a in _tensors(args)), *bits)
        found = self._results.get(key)
        if found is not None:
            self._results.move_to_end(key)
            for place, result in zip(memory.values(), found, strict=True):
                if result is not None:
                    place.copy_(result)
            return
        interpreter.launch(kernel, args)
        changed = zip(memory.values(), bits, strict=True)
        self._keep(key, [place.clone() if _digest(place) != before else None for place, before in changed])

    def _keep(self, key: Any, results: list[Tensor | None]) -> None:
        self._results[key] = results
        self._num_bytes += _bytes_in(results)
        while self._num_bytes > _MOST_BYTES:
            self._num_bytes -= _bytes_in(self._results.popitem(last=False)[1])


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    return [one for one in args if isinstance(one, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory_of(args: Sequence[Any]) -> dict[int, Tensor]:
    """Map address -> all bytes of an argument's memory, each once."""
    return {_address(one): torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage()) for one in _tensors(args)}


def _digest(memory: Tensor) -> bytes:
    return hashlib.blake2b(memory.numpy(), digest_size=16).digest()  # type: ignore[arg-type] # numpy's has a buffer


def _described(arg: Any) -> Any:
    return (arg.dtype, arg.shape, arg.stride(), arg.storage_offset()) if isinstance(arg, Tensor) else (type(arg), arg)


def _bytes_in(results: Sequence[Tensor | None]) -> int:
    return sum(result.nbytes for result in results if result is not None)
