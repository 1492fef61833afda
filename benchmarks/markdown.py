"""Tables of the pages in docs/benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
