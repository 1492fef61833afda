"""Steps that repeat: they synchronise with nothing, and allocate alike.

Plain functions of a device, as in `checks.py`. What only CUDA can tell is measured where there is CUDA; what is made
of it (`unsteady`) is a function of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fxshard
from tests.numerics.harness import adamw, blocks_of, squared_error, world_mesh
from tests.numerics.microbatches import set_sync
from tests.numerics.models import MLP

STREAMS: Final = ("nccl", "side", "off")
"""What the option `streams` may be, besides "auto"."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A sharded model that trains on the same rows in every step."""

    model: nn.Module  # compiled
    optim: Optimizer  # of its parameters
    batches: Sequence[tuple[Tensor, Tensor]]  # one per microbatch; on the device, so that a step copies nothing there
    # makes what is entered around each backward
    around_backward: Callable[[], AbstractContextManager[object]] = nullcontext

    def step(self) -> Tensor:
        losses = []
        for i, (x, y) in enumerate(self.batches):
            set_sync(self.model, i == len(self.batches) - 1)
            losses.append(squared_error(self.model, x, y) / len(self.batches))
            with self.around_backward():
                losses[-1].backward()
        self.optim.step()
        self.optim.zero_grad()
        return torch.stack([loss.detach() for loss in losses]).sum()


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the steps are: on the CPU as small as it gets, on a GPU enough to keep it busy."""

    width: int = 16
    num_blocks: int = 3
    rows: int = 4
    microbatches: int = 2

    @classmethod
    def of(cls, device: str) -> Sizes:
        return cls() if device == "cpu" else cls(width=512, rows=256, num_blocks=4)


def make_trainer(device: str, sizes: Sizes, backend: str | Callable[..., Any], **options: Any) -> Trainer:
    """Build, shard block by block, and compile.

    Args:
        device: "cuda" or "cpu".
        sizes: of model and batch.
        backend: "fxshard", or what `watched` returns, which has its options already.
        **options: of the backend.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MLP(sizes.num_blocks, sizes.width).to(device)
    for module in (*blocks_of(model), model):
        fxshard.fully_shard(module, mesh=world_mesh(device))
    compiled: Any = torch.compile(model, backend=backend, options=options or None)
    generator = torch.Generator().manual_seed(1)
    shape = sizes.microbatches, 2, sizes.rows, sizes.width
    batches = [(x, y) for x, y in torch.randn(shape, generator=generator).to(device)]
    return Trainer(model=compiled, optim=adamw(model.parameters()), batches=batches)


# ---- no synchronisation


@contextmanager
def refusing_to_synchronise(device: str) -> Iterator[None]:
    """Raise for what makes the host wait for the GPU; without a GPU nothing does."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps_without_synchronising(device: str, *, num_steps: int = 3, **options: Any) -> list[Tensor]:
    """Train in the process group that is there: some steps to compile, then steps in which the host never waits."""
    trainer = make_trainer(device, Sizes.of(device), "fxshard", **options)
    for _ in range(3):
        trainer.step()
    with refusing_to_synchronise(device):
        return [trainer.step() for _ in range(num_steps)]


# ---- the same allocations in every step


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The allocator's counters after a step: `torch.cuda.memory_stats()`."""

    allocations: int = 0  # so far
    retries: int = 0  # how often it freed its caches and tried again, so far
    active_bytes: int = 0  # in use, or waiting for a stream
    reserved_bytes: int = 0  # of the device

    @classmethod
    def now(cls, device: str) -> Sample:
        if device != "cuda":
            return cls()
        stats = torch.cuda.memory_stats()
        return cls(
            allocations=stats["allocation.all.allocated"],
            retries=stats["num_alloc_retries"],
            active_bytes=stats["active_bytes.all.current"],
            reserved_bytes=stats["reserved_bytes.all.current"],
        )


def samples_of_steps(device: str, *, num_steps: int, warmup: int = 8, **options: Any) -> list[Sample]:
    """Train in the process group that is there, and read the counters after each step but the first ones."""
    trainer = make_trainer(device, Sizes.of(device), "fxshard", **options)
    samples = []
    for step in range(warmup + num_steps):
        trainer.step()
        if step >= warmup:
            samples.append(Sample.now(device))
    return samples


def unsteady(samples: Sequence[Sample]) -> list[str]:
    """Say what is not the same in every step; nothing if all is."""
    pairs = list(itertools.pairwise(samples))
    series: Mapping[str, list[int]] = {
        "allocations per step": [after.allocations - before.allocations for before, after in pairs],
        "retries per step": [after.retries - before.retries for before, after in pairs],
        "active bytes": [sample.active_bytes for sample in samples],
        "reserved bytes": [sample.reserved_bytes for sample in samples],
    }
    found = []
    for name, values in series.items():
        if len(set(values)) > 1:
            first = next(i for i, value in enumerate(values) if value != values[0])
            found.append(f"{name}: {values[0]:,} at first, {values[first]:,} at {first}, {values[-1]:,} at last")
    if any(series["retries per step"]):
        found.append(f"{sum(series['retries per step'])} allocations were tried again")
    return found
