"""Where in a step a link stands idle: `python -m benchmarks.idle_link small 0.641`, block by block with `regional`.

Rank 0 of 8 on an emulated link of so many GB/s and 30 us. Prints for each part of a step (forward, backward, what
follows) how long it takes, how long the link is busy in it, and how long it is idle before the first transfer, between
transfers and after the last one; medians in milliseconds.
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
from fxshard.testing import Transfer, emulated_link

ROUNDS, WARM_UP = 24, 4
PARTS = ("forward", "backward", "optimizer")


def idle(transfers: list[Transfer], begin: float, end: float) -> tuple[float, float, float, float]:
    """Milliseconds between two times that the link is busy, and idle before, between and after its transfers."""
    spans = [(max(t.start_us, begin), min(t.end_us, end)) for t in transfers if t.start_us < end and t.end_us > begin]
    if not spans:
        return 0.0, (end - begin) / 1e3, 0.0, 0.0
    busy = sum(until - since for since, until in spans)
    first, last = spans[0][0], max(until for _, until in spans)
    return busy / 1e3, (first - begin) / 1e3, (last - first - busy) / 1e3, (end - last) / 1e3


def main(name: str, gigabytes_per_s: float, *, regional: bool) -> None:
    """Measure, and print JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    built: Any = getattr(models, name)()
    model, batch, loss_of = built
    found: dict[str, list[tuple[float, ...]]] = {part: [] for part in PARTS}
    with emulated_link(8, gigabytes_per_s=gigabytes_per_s, latency_us=30) as link:
        origin = cast(Any, link.engine)._origin
        for unit in (*model.blocks, model):
            fxshard.fully_shard(unit, mesh=link.mesh)
        call = cast(Any, torch.compile)(model, backend="fxshard", options={"regional": regional})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(ROUNDS):
            link.clear()
            times = [time.perf_counter()]
            loss = loss_of(call(batch), batch)
            times.append(time.perf_counter())
            loss.backward()
            times.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
            at = [(each - origin) * 1e6 for each in times]
            for part, begin, end in zip(PARTS, at, at[1:], strict=False):
                found[part].append(((end - begin) / 1e3, *idle(link.transfers, begin, end)))
    names = ("takes", "busy", "idle before", "idle between", "idle after")
    told: dict[str, dict[str, float]] = {}
    for part, rows in found.items():
        medians = (round(statistics.median(each), 1) for each in zip(*rows[WARM_UP:], strict=True))
        told[part] = dict(zip(names, medians, strict=True))
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), regional="regional" in sys.argv[3:])
