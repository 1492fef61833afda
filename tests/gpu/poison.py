"""Steps whose freed memory is written to at once compute what they compute without.

Plain functions of a device, as in `checks.py`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.steady import Sizes, make_trainer
from tests.numerics.harness import full
from tests.watching import plain_tensors, watched

NAN_BYTE: Final = 255  # any float of such bytes is no number, in fp64, fp32, fp16 and bf16


class Poison(TorchDispatchMode):
    """After each op, takes from the allocator what was freed since the op before, on the main stream, and writes NaN.

    So what is freed while another stream still reads it becomes NaN there. It is never given back: whatever the
    allocator has of that size is what was just freed. It sees the storages that go through the dispatcher: those of
    collectives and matrix products, not what only Inductor's own kernels touch.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._main = torch.cuda.current_stream() if device == "cuda" else None
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in plain_tensors((args, kwargs, result)):
            storage = tensor.untyped_storage()
            self._known.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.spread()
        return result

    @property
    def num_blocks(self) -> int:
        """How many blocks it has filled."""
        return len(self._kept)

    def spread(self) -> None:
        """Fill what has been freed by now, and one block more of each such size."""
        freed = {key: nbytes for key, (storage, nbytes) in self._known.items() if storage.expired()}
        for key in freed:
            del self._known[key]
        counts = Counter(nbytes for nbytes in freed.values() if nbytes)
        with nullcontext() if self._main is None else torch.cuda.stream(self._main):
            sizes = [size for size, count in counts.items() for _ in range(count + 1)]
            blocks = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
            for block in blocks:
                block.fill_(NAN_BYTE)
        self._kept.extend(blocks)


def poison_reaches_a_side_stream() -> bool:
    """Free memory while a stream of a GPU still is to read it, and tell whether it read poison; it should."""
    _reads_poison(sleep_cycles=0)  # so that every kernel is loaded: loading one may wait for those that run
    torch.cuda.synchronize()
    return _reads_poison(sleep_cycles=200_000_000)


def _reads_poison(*, sleep_cycles: int) -> bool:
    poison, side = Poison("cuda"), torch.cuda.Stream()
    source = torch.ones(2**20, device="cuda")
    target = torch.empty_like(source)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(sleep_cycles)
        target.copy_(source)
    with poison:
        other = source + 1
        del source
        other.neg_()
    torch.cuda.synchronize()
    return bool(target.isnan().any())


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What some steps have computed: their losses and, in full, the parameters by name."""

    losses: list[Tensor]
    params: dict[str, Tensor]


def train_in_poison(device: str, *, poisoned: bool, num_steps: int = 4, **options: Any) -> Trained:
    """Train in the process group that is there; all steps but the first one, which compiles, may be poisoned."""
    poison = Poison(device)
    context: AbstractContextManager[object] = nullcontext()
    trainer = make_trainer(device, Sizes.of(device), watched(lambda: context, **options))
    trainer = replace(trainer, around_backward=lambda: context)
    losses = [trainer.step()]
    if poisoned:
        context = poison
    for _ in range(num_steps):
        losses.append(trainer.step())
        if poisoned:
            poison.spread()
    if poisoned:
        assert poison.num_blocks > 0, "nothing was freed"
    params = {name: full(p) for name, p in trainer.model.named_parameters()}
    return Trained(losses=losses, params=params)


def check_poison(device: str, **options: Any) -> None:
    """Hold steps in poisoned memory to the same steps without."""
    clean = train_in_poison(device, poisoned=False, **options)
    poisoned = train_in_poison(device, poisoned=True, **options)
    for name, value in [*poisoned.params.items(), ("a loss", torch.stack(poisoned.losses))]:
        assert value.isfinite().all(), f"{name} is not finite: memory was freed while it was read"
    torch.testing.assert_close(poisoned.losses, clean.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(poisoned.params, clean.params, rtol=1e-5, atol=1e-6)
