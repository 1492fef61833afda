"""What launching the next step's first gather hides: `python -m benchmarks.next_step small 0.010`.

Rank 0 of 8 on an emulated link of 1.075 GB/s and 30 us. Two copies of a model take steps in turn, one with
`overlap_step`; a data loader sleeps for so many seconds between two steps, which count without it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any, cast

import torch

import fxshard
from benchmarks import models
from fxshard.testing import emulated_link

ROUNDS, WARM_UP = 24, 4


class Trained:
    """A model that takes steps."""

    def __init__(self, name: str, *, overlaps: bool) -> None:
        torch.manual_seed(0)
        built: Any = getattr(models, name)()
        model, self.batch, self.loss = built
        for block in model.blocks:
            fxshard.fully_shard(block)
        fxshard.fully_shard(model)
        self.call = cast(Any, torch.compile)(model, backend="fxshard")
        self.optim: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if overlaps:
            fxshard.overlap_step(self.optim)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, sleep_s: float) -> None:
        """Train one step after the loader has slept."""
        begin = time.perf_counter()
        time.sleep(sleep_s)
        slept = time.perf_counter() - begin
        loss = self.loss(self.call(self.batch), self.batch)
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        self.seconds.append(time.perf_counter() - begin - slept)
        self.losses.append(float(loss.detach()))


def main(name: str, sleep_s: float) -> None:
    """Measure, and print JSON."""
    torch.set_num_threads(1)
    with emulated_link(8, gigabytes_per_s=1.075, latency_us=30):
        plain, ours = Trained(name, overlaps=False), Trained(name, overlaps=True)
        for _ in range(ROUNDS):
            # Two steps of each in a row: a step of the other would be a loader of its own.
            for each in (plain, ours):
                each.step(0.0)
                each.seconds.pop()
                each.step(sleep_s)
    pairs = list(zip(ours.seconds, plain.seconds, strict=True))[WARM_UP:]
    told = {
        "plain_ms": 1e3 * statistics.median(b for _, b in pairs),
        "overlap_step_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
        "losses_equal": plain.losses == ours.losses,
    }
    print(json.dumps({key: round(value, 3) for key, value in told.items()}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
