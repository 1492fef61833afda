"""Hybrid sharding on two links: `python -m tests.tools.bench.meshes small out 8`.

For 2 x 4 and 4 x 8 ranks chooses both speeds so that FSDP2's gathers and reductions within a machine take half as long
as compute, and its all_reduces between machines a quarter. Runs `fxshard bench` there, and once more with a link
between machines that takes no time: what a step is shorter then is what it waited for the all_reduces.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.tools.bench.link_speeds import FLOOR, Report, bench, over_compute, system

SHAPES = ((2, 4), (4, 8))
WITHIN, BETWEEN, LATENCY_US = 0.5, 0.25, 30
SYSTEMS = ("fsdp2", "fsdp2_best", "fxshard")
NO_TIME = 1e6  # GB/s


def speeds(alone: Report, replicas: int, shards: int) -> tuple[float, float]:
    """GB/s within a machine and between machines."""
    moved = {op: each["bytes"] for op, each in system(alone, "fsdp2")["collectives"].items()}
    seconds = system(alone, FLOOR)["step_ms"]["median"] / 1e3
    within = (moved["all_gather"] + moved["reduce_scatter"]) * (shards - 1) / shards / (WITHIN * seconds)
    between = 2 * moved["all_reduce"] * (replicas - 1) / replicas / (BETWEEN * seconds)
    return float(f"{within / 1e9:.3g}"), float(f"{between / 1e9:.3g}")


def table(shape: tuple[int, int], within: float, between: float, report: Report, free: Report) -> str:
    """Steps over compute alone, over FSDP2 at its best, and what of them is waiting for all_reduces."""
    compute = system(report, FLOOR)["step_ms"]["median"]
    links = f"{within} GB/s, {between} GB/s between machines; compute alone {compute:.0f} ms"
    columns = ("system", "over compute", "over FSDP2 at its best", "exposed all_reduces", "MB unsharded")
    lines = [f"{shape[0]} x {shape[1]}: {links}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in SYSTEMS:
        best = system(report, name)["ratio_to"]["fsdp2_best"]
        here, without = over_compute(report, name), over_compute(free, name)
        held = system(report, name)["unsharded_peak_bytes"]
        told = f"{held / 1e6:.1f}" if held else "-"
        lines.append(f"| {name} | {here:.3f} | {best:.2f} | {(here - without) / here:.1%} | {told} |")
    return "\n".join(lines) + "\n\n"


def main(model: str, folder: Path, rounds: int) -> None:
    """Measure, and write everything into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    target, text = f"tests.tools.bench.models:{model}", ""
    for replicas, shards in SHAPES:
        name = f"{replicas}x{shards}"
        shape = ("--world-size", name)
        alone = bench(target, f"{FLOOR},fsdp2", rounds, folder / f"{name}_alone.json", *shape)
        within, between = speeds(alone, replicas, shards)
        link = (*shape, "--gigabytes-per-s", within, "--latency-us", LATENCY_US, "--between-gigabytes-per-s")
        systems = ",".join([FLOOR, *SYSTEMS])
        report = bench(target, systems, rounds, folder / f"{name}.json", *link, between)
        free = bench(target, systems, rounds, folder / f"{name}_free.json", *link, NO_TIME)
        text += table((replicas, shards), within, between, report, free)
    (folder / "meshes.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
