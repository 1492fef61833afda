"""Steps that are captured as CUDA graphs once and replayed, with accumulation too.

Plain functions of a device, as in `checks.py`; on the CPU nothing is captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.gpu.steady import Sizes, make_trainer
from tests.numerics.harness import full

WARMUP: Final = 4
"""Steps after which all is captured: one compiles, the next ones warm up and record."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What steps have computed, and how."""

    losses: list[Tensor]  # of all steps
    grads: dict[str, Tensor]  # of the last step, in full, by name
    captures: tuple[int, int]  # graphs captured in the first `WARMUP` steps, and after them
    replays: list[int]  # per step after them
    skips: int  # how often Inductor refused to capture a graph


@contextmanager
def counted(device: str) -> Iterator[Counter[str]]:
    """Count the beginnings of captures, and the replays, of all CUDA graphs."""
    counts: Counter[str] = Counter()
    if device != "cuda":
        yield counts
        return
    begin, replay = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.replay

    def counted_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        counts["captures"] += 1
        begin(graph, *args, **kwargs)

    def counted_replay(graph: Any) -> None:
        counts["replays"] += 1
        replay(graph)

    with (
        mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", counted_begin),
        mock.patch.object(torch.cuda.CUDAGraph, "replay", counted_replay),
    ):
        yield counts


def train_and_count(device: str, *, microbatches: int, num_steps: int = 4, **options: Any) -> Replayed:
    """Train in the process group that is there, `WARMUP` steps and then `num_steps`."""
    sizes = replace(Sizes.of(device), microbatches=microbatches)
    counters.clear()
    with counted(device) as counts:
        trainer = make_trainer(device, sizes, "fxshard", **options)
        grads: dict[str, Tensor] = {}
        losses, replays, captures = [], [], 0

        def keep_gradients(*_: object) -> None:
            grads.update({name: full(p.grad) for name, p in trainer.model.named_parameters() if p.grad is not None})

        trainer.optim.register_step_pre_hook(keep_gradients)
        for step in range(WARMUP + num_steps):
            before = counts["replays"]
            losses.append(trainer.step())
            if step < WARMUP:
                captures = counts["captures"]
            else:
                replays.append(counts["replays"] - before)
        return Replayed(
            losses=losses,
            grads=grads,
            captures=(captures, counts["captures"] - captures),
            replays=replays,
            skips=counters["inductor"]["cudagraph_skips"],
        )


def assert_same(ours: Replayed, reference: Replayed) -> None:
    """Hold losses and gradients to those of a run without graphs."""
    torch.testing.assert_close(ours.losses, reference.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grads, reference.grads, rtol=1e-5, atol=1e-6)
