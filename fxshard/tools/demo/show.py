"""Show the demo on a terminal as it runs; in a pipe or a log file, as plain lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from fxshard.tools.demo.config import DemoConfig
from fxshard.tools.demo.events import Event, Run, Started, Step
from fxshard.tools.demo.outcome import Outcome
from fxshard.tools.launch.console import LiveConsole, print_line, print_verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

_NUM_LINES = 8  # of the loss table, and of the plain progress per run


class DemoConsole(LiveConsole):
    """Live progress while the ranks run, or whole lines where there is no terminal; a context manager."""

    def __init__(self, console: Console, outcome: Outcome) -> None:
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

        super().__init__(
            console,
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
        self._outcome = outcome
        self._tasks: dict[Run, TaskID] = {}
        self._lines = _spread(outcome.config.steps, _NUM_LINES)

    def __enter__(self) -> Self:
        """Say what is about to run."""
        config = self._outcome.config
        self.say(
            f"fxshard demo: {config.model} on {_ranks(config)} ({config.device}), "
            f"{config.steps} steps, {config.tokens_per_step} tokens per step, lowered to {config.lower}"
        )
        return super().__enter__()

    def on(self, event: Event) -> None:
        """Show what changed with `event`, which the outcome has taken in already."""
        match event:
            case Started() if event.run not in self._tasks:
                self._start(event.run)
            case Step():
                self._step(event)

    def _start(self, run: Run) -> None:
        config, outcome = self._outcome.config, self._outcome
        text = "compiling" if run is Run.SHARDED else "starting"
        self._tasks[run] = self._progress.add_task(run.value, total=config.steps, text=text)
        if not self.has_bars:
            self.say(f"{run.value}: {text} a model of {outcome.num_params / 1e6:.1f}M parameters")

    def _step(self, event: Step) -> None:
        losses = self._outcome.losses(event.run)
        if len(losses) <= event.step:  # some rank has not taken it yet
            return
        text = f"loss {losses[-1]:.4f}"
        if tokens_per_s := self._outcome.tokens_per_s(event.run):
            text += f"  {tokens_per_s:,.0f} tokens/s"
        text += f"  {_mib(event.state_bytes)} per rank"
        if event.run is Run.SHARDED:
            text += f" of {_mib(self._outcome.full_bytes)}"
        self._progress.update(self._tasks[event.run], completed=len(losses), text=text)
        if not self.has_bars and event.step in self._lines:
            self.say(f"{event.run.value}: step {event.step + 1}/{self._outcome.config.steps}  {text}")


def show_end(console: Console, outcome: Outcome, seconds: float) -> None:
    """Print the loss table, what was measured, and the verdict in the last line."""
    console.print()
    console.print(_loss_table(outcome))
    console.print(_unit_table(outcome))
    for name, value in _facts(outcome, seconds):
        print_line(console, f"{name:<22}{value}")
    print_verdict(console, outcome.problems(), label="FAILED", success=_success(outcome))


def _loss_table(outcome: Outcome) -> Table:
    from rich.table import Table

    sharded, unsharded = outcome.losses(Run.SHARDED), outcome.losses(Run.UNSHARDED)
    table = Table(title="loss on the same batches" if unsharded else "loss")
    columns = ["step", f"sharded, {_ranks(outcome.config)}"] + ["unsharded", "difference"] * bool(unsharded)
    for column in columns:
        table.add_column(column, justify="right")
    for step in _spread(len(sharded), _NUM_LINES):
        row = [str(step + 1), f"{sharded[step]:.6f}"]
        if unsharded:
            row += [f"{unsharded[step]:.6f}", f"{abs(sharded[step] - unsharded[step]):.1e}"]
        table.add_row(*row)
    return table


def _unit_table(outcome: Outcome) -> Table:
    from rich.table import Table

    table = Table(title="each unit is gathered when it is needed, and its gradients are reduced")
    for column in ("unit", "parameters", "forward", "backward"):
        table.add_column(column, justify="right" if column == "parameters" else "left")
    for unit in outcome.units:
        found = [unit.launches.get(kind) for kind in ("forward", "backward")]
        row = [_launches(each) if each is not None else "where it is read" for each in found]
        table.add_row(unit.name, f"{unit.num_params:,}", *row)
    return table


def _launches(collectives: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in collectives.items()) or "no collectives"


def _facts(outcome: Outcome, seconds: float) -> list[tuple[str, str]]:
    facts = []
    if (difference := outcome.largest_difference()) is not None:
        facts.append(("largest difference", f"{difference:.1e} over all {outcome.config.steps} steps"))
    share = outcome.state_bytes / outcome.full_bytes
    facts.append(
        (
            "stored per rank",
            f"{_mib(outcome.state_bytes)} of parameters, gradients and AdamW state, "
            f"{share:.1%} of the full model's {_mib(outcome.full_bytes)}",
        )
    )
    speeds = {run.value: outcome.tokens_per_s(run) for run in Run}
    facts.append(("tokens per second", ", ".join(f"{speed:,.0f} {run}" for run, speed in speeds.items() if speed)))
    for graph in outcome.graphs:
        facts.append((f"{graph.kind} graph", f"{_launches(graph.collectives)} per call: {graph.path}"))
    most = max((4 * unit.num_params for unit in outcome.units), default=0)  # float32; `bucket_peak_share` is 1.0
    facts.append(
        (
            "one graph for all",
            f"without regional=True small launches are merged, for at most {_mib(most)} more of gathered parameters, "
            "and of gradients, at once: docs/passes/bucket_collectives.md",
        )
    )
    facts.append(("time", f"{seconds:.0f} s, {outcome.first_step_s(Run.SHARDED):.0f} s of them the first step"))
    return facts


def _success(outcome: Outcome) -> str:
    losses = outcome.losses(Run.SHARDED)
    text = f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}"
    if (difference := outcome.largest_difference()) is not None:
        text += f", and sharded training equals unsharded training to {difference:.1e}"
    return text + "."


def _spread(num_steps: int, num_wanted: int) -> list[int]:
    if num_steps <= num_wanted:
        return list(range(num_steps))
    return [round(i * (num_steps - 1) / (num_wanted - 1)) for i in range(num_wanted)]


def _ranks(config: DemoConfig) -> str:
    return f"{config.ranks} rank{'s' * (config.ranks > 1)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
