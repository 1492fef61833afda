"""Two mesh axes on two links: `python -m benchmarks.meshes small out 8`, and with `tp` behind it.

For 2 x 4 and 4 x 8 ranks chooses both speeds so that FSDP2's gathers and reductions within a machine take half as long
as compute, and its all_reduces between machines a quarter. Runs `fxshard bench` there, and once more with a link
between machines that takes no time: what a step is shorter then is what it waited for the all_reduces.

With `tp` (`... llama out 8 tp 2x4`) for 2 machines of 4 ranks that split each layer, sharded between machines:
transfers of tensor parallelism take a quarter as long as compute, FSDP2's gathers and reductions half. The step of the
layers alone, with what they send within the machine, is what the others are compared with.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import markdown
from benchmarks.link_speeds import FLOOR, Report, bench, over_compute, system

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


def speeds_beside(alone: Report, machines: int, ranks: int) -> tuple[float, float]:
    """GB/s within a machine and between machines, where layers are split within and sharded between."""
    layers, sharded = (system(alone, name)["collectives"] for name in (FLOOR, "fsdp2"))
    seconds = system(alone, FLOOR)["step_ms"]["median"] / 1e3
    sent = {op: each["bytes"] * (2 if op == "all_reduce" else 1) for op, each in layers.items()}
    more = {op: each["bytes"] - layers.get(op, {"bytes": 0})["bytes"] for op, each in sharded.items()}
    within = sum(sent.values()) * (ranks - 1) / ranks / (BETWEEN * seconds)
    between = (more["all_gather"] + more["reduce_scatter"]) * (machines - 1) / machines / (WITHIN * seconds)
    return float(f"{within / 1e9:.3g}"), float(f"{between / 1e9:.3g}")


def measure(target: str, folder: Path, rounds: int, machines: int, ranks: int, *, splits: bool) -> str:
    """Measure replicas on machines, or layers that are split over the ranks of a machine; the table."""
    name = "tp" if splits else f"{machines}x{ranks}"
    shape = ("--world-size", f"{machines}x{ranks}", *(("--tensor-parallel", ranks) if splits else ()))
    alone = bench(target, f"{FLOOR},fsdp2", rounds, folder / f"{name}_alone.json", *shape)
    within, between = (speeds_beside if splits else speeds)(alone, machines, ranks)
    link = (*shape, "--gigabytes-per-s", within, "--latency-us", LATENCY_US, "--between-gigabytes-per-s")
    systems = ",".join([FLOOR, *SYSTEMS])
    report = bench(target, systems, rounds, folder / f"{name}.json", *link, between)
    free = bench(target, systems, rounds, folder / f"{name}_free.json", *link, NO_TIME)
    exposed = "exposed gathers and reductions" if splits else "exposed all_reduces"
    return table((machines, ranks), within, between, report, free, exposed)


def table(shape: tuple[int, int], within: float, between: float, report: Report, free: Report, exposed: str) -> str:
    """Steps over compute alone, over FSDP2 at its best, and what of them is waiting for what goes between machines."""
    compute = system(report, FLOOR)["step_ms"]["median"]
    links = f"{within} GB/s, {between} GB/s between machines; compute alone {compute:.0f} ms"
    columns = ("system", "over compute", "over FSDP2 at its best", exposed, "MB unsharded", "loss off by")
    rows = []
    for name in SYSTEMS:
        best = system(report, name)["ratio_to"]["fsdp2_best"]
        here, without = over_compute(report, name), over_compute(free, name)
        held = system(report, name)["unsharded_peak_bytes"]
        told = f"{held / 1e6:.1f}" if held else "-"
        off = system(report, name)["loss_difference"]
        rows.append((name, f"{here:.3f}", f"{best:.2f}", f"{(here - without) / here:.1%}", told, f"{off:.1e}"))
    return f"{shape[0]} x {shape[1]}: {links}\n\n{markdown.table(columns, rows)}\n\n"


def main(model: str, folder: Path, rounds: int, axis: str = "replicate", split: str = "4x2") -> None:
    """Measure, and write everything into a folder; `split` is machines x ranks of each, where layers are split."""
    folder.mkdir(parents=True, exist_ok=True)
    machines, ranks = map(int, split.split("x"))
    shapes = [(machines, ranks)] if axis == "tp" else SHAPES
    target = f"benchmarks.models:{model}"
    text = "".join(measure(target, folder, rounds, *shape, splits=axis == "tp") for shape in shapes)
    (folder / "meshes.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
