"""What it costs that a backward adds to accumulators.

`python -m benchmarks.accumulating_backward [--model small]`

One process, rank 0 of 8 on a link that takes no time, parameters resident, so that no backward gathers: what is left of
an accumulating backward is compute. Beside it stands the compiled backward of the model without any library, for a
first microbatch, which gives `.grad` the gradients that it has made, and for later ones, which add to it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

import fxshard
from benchmarks import models
from fxshard.testing import emulated_link
from fxshard.tools.bench.task import units_of

TARGET = 1.05

Step = Callable[[], Tensor]


def backward_seconds(step: Step, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> float:
    """Seconds of one backward; its forward is not counted."""
    with around():
        loss = step()
        start = time.perf_counter()
        cast(Any, loss).backward()
        return time.perf_counter() - start


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each backward, by what it is, interleaved."""
    torch.manual_seed(0)
    model, tokens, loss_fn = getattr(models, name)()
    plain, _, _ = getattr(models, name)()
    local = torch.compile(plain)
    for unit in units_of(model):
        fxshard.fully_shard(unit)
    options = {"resident_gib": 64}
    ours = cast(nn.Module, cast(Any, torch.compile)(model, backend="fxshard", options=options))

    def alone() -> Tensor:
        return cast(Tensor, loss_fn(cast(Any, local)(tokens), tokens))

    def sharded() -> Tensor:
        return cast(Tensor, loss_fn(ours(tokens), tokens))

    found: dict[str, list[float]] = {"plain": [], "plain, adding": [], "accumulating, first": [], "accumulating": []}
    for i in range(rounds + 2):
        cast(nn.Module, local).zero_grad()
        times = [backward_seconds(alone), backward_seconds(alone)]
        times += [backward_seconds(sharded, lambda: fxshard.no_sync(ours)) for _ in range(2)]
        cast(fxshard.ShardedModule, model).reset_iter_state()
        if i >= 2:
            for key, seconds in zip(found, times, strict=True):
                found[key].append(seconds)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--rounds", type=int, default=12)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with emulated_link(8):
        found = measure(chosen.model, chosen.rounds)
    plain = found["plain"]
    for key, seconds in found.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, plain, strict=True))
        print(f"{key:<22}{statistics.median(seconds) * 1e3:8.1f} ms  {ratio:6.3f} x plain")
    print(f"target: accumulating <= {TARGET} x plain")


if __name__ == "__main__":
    main()
