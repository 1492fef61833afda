"""Show how far a long transfer has come, to whoever sits at a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def showing(title: str, sizes: Iterable[int]) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr while the block runs, if that is a terminal and there is anything to move.

    Args:
        title: what stands before the bar.
        sizes: bytes to be moved; none show nothing.

    Yields:
        What to call with the number of bytes that have arrived.
    """
    total = sum(sizes) if _is_watched() else 0
    if not total:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    amounts = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), *amounts, console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda arrived: bar.advance(task, arrived)


def _is_watched() -> bool:
    """Whether stderr is a terminal; a daemon may have none, or has closed it."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
