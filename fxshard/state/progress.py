"""Show on a terminal how far a long transfer has come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


@contextlib.contextmanager
def showing(title: str, sizes: Iterable[int]) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr while the block runs; yield what to call with the number of bytes that have arrived."""
    stderr = sys.stderr  # a daemon may have none, or has closed it
    total = sum(sizes) if stderr is not None and not stderr.closed and stderr.isatty() else 0
    if not total:
        yield lambda _: None
        return
    with bytes_bar(with_speed=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda arrived: bar.advance(task, arrived)


def bytes_bar(*, with_speed: bool = False) -> Progress:
    """Make a bar that counts bytes on stderr and is gone at the end; nothing shows where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        *([TransferSpeedColumn()] if with_speed else []),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
