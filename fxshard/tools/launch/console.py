"""The terminal that the commands print on: lines as they are, bars that move, and a verdict.

In a pipe or a log file nothing moves, and every line is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn


def open_console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """The terminal that tables go to, or that of `stderr`; `quiet` shows nothing."""
    from rich.console import Console

    return Console(quiet=quiet, stderr=stderr)


def print_line(console: Console, line: str, *, style: str | None = None) -> None:
    """Print one line as it is: not wrapped, not highlighted, without markup."""
    console.print(line, style=style, soft_wrap=True, highlight=False, markup=False)


def print_verdict(console: Console, problems: Sequence[str], *, label: str, success: str) -> None:
    """Print every problem after `label`, or that all is well."""
    for problem in problems:
        print_line(console, f"{label}: {problem}", style="bold red")
    if not problems:
        print_line(console, f"OK: {success}", style="bold green")


class LiveConsole:
    """Bars that move below the lines that are printed, on a terminal alone; a context manager."""

    def __init__(
        self, console: Console, *columns: ProgressColumn, transient: bool = False, auto_refresh: bool = True
    ) -> None:
        from rich.progress import Progress

        self.has_bars = console.is_terminal
        self._console = console
        self._progress = Progress(
            *columns, console=console, transient=transient, auto_refresh=auto_refresh, disable=not self.has_bars
        )

    def __enter__(self) -> Self:
        """Begin to move."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop moving."""
        self._progress.stop()

    def say(self, line: str, *, style: str | None = None) -> None:
        """Print one line as it is, above the bars."""
        print_line(self._console, line, style=style)
