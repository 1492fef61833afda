"""A picture of a report: one bar per system."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path

from fxshard.errors import ConfigError, MissingExtraError
from fxshard.tools.bench.config import BenchConfig
from fxshard.tools.bench.result import FLOORS, Report
from fxshard.tools.bench.show import describe_group


def require_plot(path: Path) -> None:
    """Fail before anything is measured."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot {path} must end in .svg or .png.")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "report")


def save_plot(report: Report, config: BenchConfig, path: Path) -> None:
    """Draw the medians as bars, minimum and maximum as whiskers, and the floor as a line."""
    from matplotlib.figure import Figure

    measured = [result for result in report.systems if result.steps]
    medians = [1e3 * statistics.median(result.steps) for result in measured]
    below = [median - 1e3 * min(result.steps) for median, result in zip(medians, measured, strict=True)]
    above = [1e3 * max(result.steps) - median for median, result in zip(medians, measured, strict=True)]
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(measured)), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:orange" if result.entry.system == "fxshard" else "tab:blue" for result in measured]
    axes.barh([result.name for result in measured], medians, xerr=[below, above], color=colors, capsize=3)
    for floor in [result for result in report.bases.values() if result.name in FLOORS]:
        axes.axvline(1e3 * statistics.median(floor.steps), color="gray", linestyle="--", label=floor.name)
        axes.legend()
    axes.invert_yaxis()
    axes.set_xlabel("ms per step (median, minimum and maximum)")
    axes.set_title(f"{config.target}, {describe_group(config)}", fontsize="medium")
    figure.savefig(path)
