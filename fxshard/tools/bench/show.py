"""Show on a terminal what runs and what came of it; in a pipe or a log file, as plain lines."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from fxshard.tools.bench.config import ONE_GPU, REFERENCE, BenchConfig
from fxshard.tools.bench.result import FLOORS, Report, SystemResult
from fxshard.tools.bench.traffic import Traffic
from fxshard.tools.launch.console import LiveConsole, print_line, print_verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_NONE = "-"  # in the table: not measured, or not known
_SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}
_TABLE_WIDTH = 160  # characters that the table takes at most
_PLAIN_ROUNDS = 5  # of which a log file hears


class BenchConsole(LiveConsole):
    """Live progress; a context manager."""

    def __init__(self, console: Console, config: BenchConfig) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn()
        # A thread that draws would take time from the ranks.
        super().__init__(console, *columns, transient=True, auto_refresh=False)
        self._config = config
        self._task = self._progress.add_task("")

    def begin(self, report: Report) -> None:
        """Say what is about to run."""
        config, num_systems = self._config, len(report.systems)
        several = f"{config.microbatches} microbatches per step, " if config.microbatches > 1 else ""
        self.say(
            f"fxshard bench: {config.target}, {describe_group(config)}{_dtype(config)}, {num_systems} systems, "
            f"{several}{config.rounds} rounds in each of {config.processes} process(es)"
        )

    def starting(self, name: str, index: int, process: int) -> None:
        """A system starts."""
        what = "the losses of training without any library" if name == REFERENCE else f"{name}: first steps"
        place = "" if name == REFERENCE else f" ({index + 1}/{len(self._config.entries)})"
        self._describe(f"{self._process(process)}{what}{place}", total=0)
        if not self.has_bars:
            self.say(f"{self._process(process)}{what}{place}")

    def ready(self, result: SystemResult) -> None:
        """A system has compiled."""
        self.say(f"  {result.name}: first step {result.ready_s[-1]:.1f} s, loss {result.losses[0]:.4f}")

    def failed(self, result: SystemResult) -> None:
        """A system has failed."""
        self.say(f"  {result.name} failed: {result.error}", style="red")

    def round(self, number: int, process: int) -> None:
        """A round starts; -1 is the one that warms up."""
        rounds = self._config.rounds
        text = "warming up" if number < 0 else f"round {number + 1}/{rounds}"
        self._describe(f"{self._process(process)}{text}", total=rounds, completed=max(number, 0))
        every = max(1, rounds // _PLAIN_ROUNDS)
        if not self.has_bars and number >= 0 and ((number + 1) % every == 0 or number + 1 == rounds):
            self.say(f"{self._process(process)}{text}")

    def _process(self, number: int) -> str:
        return f"process {number + 1}/{self._config.processes}, " if self._config.processes > 1 else ""

    def _describe(self, text: str, *, total: int, completed: int = 0) -> None:
        self._progress.update(self._task, description=text, total=total or None, completed=completed)
        self._progress.refresh()


def describe_group(config: BenchConfig) -> str:
    """The group in words."""
    if config.group != "emulated":
        return f"{config.ranks} ranks ({config.group})" + f" on {config.machines} machines" * (config.machines > 1)
    kind = f"rank 0 of {config.world_size} on an emulated link"
    speed = f"{config.gigabytes_per_s:g} GB/s, latency {config.latency_us:g} us"
    if config.replicas > 1:
        between = f"{config.between_gigabytes_per_s:g} GB/s, {config.between_latency_us:g} us"
        split = config.tensor_parallel
        machines = f"{config.replicas} machines" if split > 1 else f"{config.replicas} replicas on a machine each"
        kind, speed = f"{kind}, {machines}", f"{speed}; between machines {between}"
        kind += f", layers split over {split} ranks" if split > 1 else ""
    if config.device == "cuda":
        return f"{ONE_GPU}: {kind} ({speed}, {config.ctas} CTAs)"
    return f"{kind} ({speed})"


def _dtype(config: BenchConfig) -> str:
    return f", {config.dtype}" if config.dtype is not None else ""


def show_report(console: Console, report: Report, config: BenchConfig) -> None:
    """Print the table and what is wrong; nothing is cut off where there is no terminal."""
    if not console.is_terminal:
        console.width = _TABLE_WIDTH
    console.print(_table(report, config))
    print_line(console, _legend(report))
    success = "all systems ran, and their losses agree."
    print_verdict(console, report.problems(), label="PROBLEM", success=success)


def _table(report: Report, config: BenchConfig) -> Table:
    from rich.table import Table

    table = Table(
        title=f"{config.target}: {report.num_params / 1e6:.1f}M parameters in {report.num_units} units, "
        f"{describe_group(config)}{_dtype(config)}"
    )
    table.add_column("system", no_wrap=True)
    ratios = [f"/ {'floor' if name in FLOORS else name}" for name in report.bases]
    memory = ["GPU MB"] if _has_memory(report) else []
    for column in ("ms per step", *ratios, "first step s", "launches", "MB", "unsharded MB", *memory, "loss off by"):
        table.add_column(column, justify="right")
    for result in report.systems:
        table.add_row(result.name, *_cells(result, report))
    return table


def _cells(result: SystemResult, report: Report) -> list[str]:
    if not result.steps:
        return ["failed" if result.error is not None else _NONE]
    steps = [1e3 * seconds for seconds in result.steps]
    off = report.difference(result)
    ratios = [result.ratio(base) for base in report.bases.values()]
    cold, *warm = result.ready_s
    launches = [f"{traffic.launches} {_SHORT[name]}" for name, traffic in result.traffic.items()]
    sent = sum(result.traffic.values(), Traffic()).nbytes if result.traffic else None
    peak, memory = result.unsharded_peak_bytes, [result.memory_peak_bytes] if _has_memory(report) else []
    return [
        f"{statistics.median(steps):.1f} ({min(steps):.1f}-{max(steps):.1f})" + " then failed" * bool(result.error),
        *(_NONE if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        f"{cold:.1f}" + (f" ({statistics.median(warm):.1f})" if warm else ""),
        " ".join(launches) or _NONE,
        *(_NONE if nbytes is None else _megabytes(nbytes) for nbytes in (sent, peak, *memory)),
        _NONE if off is None else f"{off:.0e}",
    ]


def _has_memory(report: Report) -> bool:
    return any(result.memory_peak_bytes is not None for result in report.systems)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f}" if nbytes >= 1e6 else f"{nbytes / 1e6:.2g}"


def _legend(report: Report) -> str:
    emulated = report.options["group"] == "emulated"
    floor = next((name for name in report.bases if name in FLOORS), None)
    lines = [
        "ms per step: median (minimum-maximum) of all rounds.",
        "/ NAME: median of the ratios to NAME in the same round; below 1 is faster."
        + (f" The floor is {floor}." if floor else ""),
        "launches, MB: collectives of one step (AG all_gather, RS reduce_scatter, AR all_reduce), and the unsharded "
        "bytes that they carry.",
        "unsharded MB: gathered parameters at once, where the system knows.",
        *(
            ["GPU MB: tensors at once on the GPU of the rank that has most, optimizer included."]
            if _has_memory(report)
            else []
        ),
        "loss off by: relative, from training without any library on the same batches"
        + ("; of sharded systems, whose emulated peers are copies, from the first of them." if emulated else "."),
    ]
    if any(len(result.ready_s) > 1 for result in report.systems):
        lines.append("first step s: with empty caches (later processes, with what the first one compiled).")
    return "\n".join(lines)
