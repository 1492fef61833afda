"""Look into compiled graphs while they run: a context around each forward, the memory it takes; and what is logged.

Dynamo would run a model eagerly under a dispatch mode, so a mode is entered inside what the backend returns. Backward
needs no such help: the mode goes around `backward()`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxshard.compile import backend


def watched(context: Callable[[], AbstractContextManager[object]], **options: Any) -> Callable[..., Any]:
    """Return our backend as `torch.compile` takes it, with a context around each run of a forward graph.

    Args:
        context: makes one.
        **options: of the backend.
    """

    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = backend.fxshard(gm, inputs, options=options)

        def forward(*args: Any) -> Any:
            with context():
                return run(*args)

        return forward

    return compile_graph


def plain_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested containers that have memory of their own: no DTensor."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that ops make, less what they free of those that were there before.

    It sees what goes through the dispatcher: graphs that are interpreted, not what a kernel allocates for itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.growth = 0
        self._freed = 0
        self._known: dict[int, tuple[StorageWeakRef, int, bool]] = {}

    def __enter__(self) -> Any:
        self.growth = self._freed = 0
        self._known.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look_at((args, kwargs or {}), made=False)
        result = func(*args, **(kwargs or {}))
        self._look_at(result, made=True)
        self._forget_the_freed()
        live = sum(nbytes for _, nbytes, made in self._known.values() if made)
        self.growth = max(self.growth, live - self._freed)
        return result

    def _look_at(self, values: Any, *, made: bool) -> None:
        for tensor in plain_tensors(values):
            storage = tensor.untyped_storage()
            self._known.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes(), made))

    def _forget_the_freed(self) -> None:
        freed = {key: each for key, each in self._known.items() if each[0].expired()}
        self._freed += sum(nbytes for _, nbytes, made in freed.values() if not made)
        for key in freed:
            del self._known[key]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of the storages behind tensors, each storage once."""
    local = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
    storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in local) if s.nbytes()}
    return sum(storages.values())


def bytes_of_rows(model: nn.Module) -> int:
    """Count the bytes of a rank's rows of all parameters, with rows padded to a multiple of the world size."""
    shapes = [p.shape for p in model.parameters()]
    return sum(-(-shape[0] // dist.get_world_size()) * shape[1:].numel() * 4 for shape in shapes)


@contextmanager
def said_by(module: str) -> Iterator[list[str]]:
    """Collect what a module of fxshard logs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(module)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
