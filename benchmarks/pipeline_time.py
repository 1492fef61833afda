"""How the time of the pass pipeline grows with the graph: `python -m benchmarks.pipeline_time --png out.png`.

Seconds are of this thread's CPU time. Python's cyclic garbage collector walks every object of the process, torch's and
Dynamo's included, whenever enough new ones were made, and does so in the middle of whatever runs; so the pipeline is
measured with the collector off, and once more with it on.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import fxshard
from benchmarks.clock import PARTS, Clock, clocked
from fxshard.tools.demo.gpt import GPT

LAYERS = (8, 32, 126)
WORLD_SIZE, SEQ_LEN, BATCH, DIM = 4, 64, 2, 256
MAX_SLOPE = 1.15


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured."""

    lowering: str  # in whose dialect of aten
    collector: bool  # whether Python's garbage collector is on

    def __str__(self) -> str:
        return f"{self.lowering}, collector {'on' if self.collector else 'off'}"


SETTINGS = (
    Setting(lowering="inductor", collector=False),
    Setting(lowering="eager", collector=False),
    Setting(lowering="inductor", collector=True),
    Setting(lowering="eager", collector=True),
)


def measure(num_layers: int, setting: Setting) -> Clock:
    """Run all passes with their checks on the joint, the forward and the backward graph of a GPT on meta."""
    with torch.device("meta"):
        model = GPT(SEQ_LEN, dim=DIM, num_layers=num_layers)
        tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
    gc.collect()
    if not setting.collector:
        gc.disable()
    try:
        with clocked(time.thread_time) as clock:
            fxshard.explain(model, tokens, world_size=WORLD_SIZE, options={"lower": setting.lowering})
    finally:
        gc.enable()
    return clock


def slope(clocks: Sequence[Clock]) -> float:
    """Least-squares slope of log seconds over log nodes: 1 is linear."""
    xs = [math.log(clock.num_nodes) for clock in clocks]
    ys = [math.log(clock.total) for clock in clocks]
    return statistics.linear_regression(xs, ys).slope


def plot(measured: dict[Setting, list[Clock]], path: Path) -> None:
    """Draw seconds over nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for setting, clocks in measured.items():
        nodes, seconds = [clock.num_nodes for clock in clocks], [clock.total for clock in clocks]
        axes.loglog(nodes, seconds, "o--" if setting.collector else "o-", label=f"{setting}: slope {slope(clocks):.2f}")
    clocks = measured[SETTINGS[0]]
    first = clocks[0].total / clocks[0].num_nodes
    axes.loglog([c.num_nodes for c in clocks], [c.num_nodes * first for c in clocks], "k:", label="linear")
    axes.set_xlabel("nodes of the joint, forward and backward graphs")
    axes.set_ylabel("CPU seconds")
    axes.set_title(f"Pass pipeline, verifier included: slope {slope(clocks):.2f} (log-log)")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(setting: Setting, num_layers: int, clock: Clock) -> str:
    """One line."""
    parts = ", ".join(f"{part} {clock.seconds[part]:.2f}" for part in PARTS)
    each = clock.total / clock.num_nodes * 1e6
    return (
        f"{setting}: {num_layers} layers, {clock.num_nodes} nodes, {clock.total:.2f} s, {each:.0f} us a node ({parts})"
    )


def main() -> None:
    """Print the measurements, and draw them if asked to."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}")
    measure(1, SETTINGS[0])  # what a process pays once
    measured: dict[Setting, list[Clock]] = {}
    for setting in SETTINGS:
        for num_layers in LAYERS:
            clock = measure(num_layers, setting)
            measured.setdefault(setting, []).append(clock)
            print(report(setting, num_layers, clock), flush=True)
        print(f"{setting}: slope {slope(measured[setting]):.3f}, target at most {MAX_SLOPE}", flush=True)
    if args.png is not None:
        plot(measured, args.png)


if __name__ == "__main__":
    main()
