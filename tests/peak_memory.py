"""The most memory that tensors take at a time, counted."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory(TorchDispatchMode):
    """Follows the memory that is new inside, by the storages of all results of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {each.untyped_storage()._cdata for each in args if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else (result,):
            if isinstance(each, Tensor) and type(each) is Tensor:
                storage = each.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self.storages:
                    self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: each for key, each in self.storages.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.storages.values()))
        return result
