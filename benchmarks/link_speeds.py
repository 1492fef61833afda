"""Steps over compute alone at several speeds of a link: `python -m benchmarks.link_speeds small out 8`.

Times compute alone, chooses link speeds from it and from what a step moves, runs `fxshard bench` at each with as many
rounds as the last argument says, and writes its JSON, a table and the picture of the README into the folder. A speed is
told as the time of FSDP2's transfers over that of compute.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import markdown
from fxshard.tools import cli

WORLD_SIZE, LATENCY_US = 8, 30
LOADS = (0.25, 0.5, 1.0, 1.5)
SYSTEMS = {"fsdp2": "FSDP2", "fsdp2_best": "FSDP2 at its best", "simplefsdp": "SimpleFSDP", "fxshard": "fxshard"}
DRAWN = ("simplefsdp", "fsdp2_best", "fxshard")
FLOOR = "local_compiled"

Report = dict[str, Any]


def bench(target: str, systems: str, rounds: int, path: Path, *link: object) -> Report:
    """What `fxshard bench` tells."""
    given = ["--group", "emulated", *link, "--systems", systems, "--rounds", rounds]
    code = cli.main([str(word) for word in ("bench", target, *given, "--json", path)])
    if code:
        raise SystemExit(code)
    return json.loads(path.read_text())


def system(report: Report, name: str) -> Report:
    """What it tells of one system."""
    return next(each for each in report["systems"] if each["name"] == name)


def gigabytes_per_s(load: float, report: Report) -> float:
    """The speed at which FSDP2's transfers take `load` times as long as compute."""
    moved = sum(each["bytes"] for each in system(report, "fsdp2")["collectives"].values())
    seconds = load * system(report, FLOOR)["step_ms"]["median"] / 1e3
    return float(f"{moved * (WORLD_SIZE - 1) / WORLD_SIZE / seconds / 1e9:.3g}")


def over_compute(report: Report, name: str) -> float:
    """Median over the rounds of the step over that of compute alone."""
    return float(system(report, name)["ratio_to"][FLOOR])


def table(reports: dict[float, Report]) -> str:
    """Steps over compute alone, in parentheses over FSDP2 at its best."""
    speeds = [f"{load}: {report['options']['gigabytes_per_s']} GB/s" for load, report in reports.items()]
    rows = [["compute alone", *(f"{system(r, FLOOR)['step_ms']['median']:.0f} ms" for r in reports.values())]]
    for name, title in SYSTEMS.items():
        best = [system(report, name)["ratio_to"]["fsdp2_best"] for report in reports.values()]
        pairs = zip(reports.values(), best, strict=True)
        rows.append([title, *(f"{over_compute(report, name):.3f} ({ratio:.2f})" for report, ratio in pairs)])
    return markdown.table(["system", *speeds], rows) + "\n"


def draw(reports: dict[float, Report], path: Path) -> None:
    """Draw one group of bars for each speed, and compute alone as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    width, colors = 0.26, dict(zip(DRAWN, ("tab:gray", "tab:blue", "tab:orange"), strict=True))
    for i, name in enumerate(DRAWN):
        heights = [over_compute(report, name) for report in reports.values()]
        places = [place + (i - 1) * width for place in range(len(reports))]
        bars = axes.bar(places, heights, width, label=SYSTEMS[name], color=colors[name])
        axes.bar_label(bars, fmt="%.2f", fontsize="small")
    axes.axhline(1, color="black", linestyle="--", linewidth=1, label="compute alone")
    axes.set_xticks(range(len(reports)), [f"{load:g} x" for load in reports])
    axes.set_xlabel("transfers of FSDP2 over compute")
    axes.set_ylabel("step over compute alone")
    axes.legend(loc="upper left", fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main(model: str, folder: Path, rounds: int) -> None:
    """Measure, and write everything into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    target = f"benchmarks.models:{model}"
    size = ("--world-size", WORLD_SIZE)
    alone = bench(target, f"{FLOOR},fsdp2", rounds, folder / "alone.json", *size)
    reports: dict[float, Report] = {}
    for load in LOADS:
        link = (*size, "--gigabytes-per-s", gigabytes_per_s(load, alone), "--latency-us", LATENCY_US)
        reports[load] = bench(target, ",".join([FLOOR, *SYSTEMS]), rounds, folder / f"{load}.json", *link)
    draw(reports, folder / "link_speeds.png")
    (folder / "link_speeds.md").write_text(table(reports))
    sys.stdout.write(table(reports))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
