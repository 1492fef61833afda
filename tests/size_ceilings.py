"""Ceilings: how large the parts of the repository may get. A feature that needs more removes something else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TOOLS, CORE = ("tools", "testing"), ("", "sharding", "compile", "ir", "passes", "ranks", "runtime")


class Ceiling(NamedTuple):
    """A part, its size now, and the most that it may be."""

    what: str
    now: int
    most: int


def _texts(folder: str, pattern: str) -> dict[str, str]:
    """The files below a folder by their path in it; `passes` of the package is a link, which no pattern follows."""
    return {str(path.relative_to(ROOT / folder)): path.read_text() for path in (ROOT / folder).rglob(pattern)}


def _lines(texts: Iterable[str]) -> int:
    return sum(len(text.splitlines()) for text in texts)


SOURCES = {**_texts("fxshard", "*.py"), **{f"passes/{name}": text for name, text in _texts("passes", "*.py").items()}}
"""Modules of the package by their path in it."""

CEILINGS = (
    Ceiling(
        "lines of `fxshard/` and `passes/` without `tools/` and `testing/`",
        _lines(text for name, text in SOURCES.items() if not name.startswith(TOOLS)),
        36_045,
    ),
    Ceiling(
        "lines of `tools/` and `testing/`",
        _lines(text for name, text in SOURCES.items() if name.startswith(TOOLS)),
        5_450,
    ),
    Ceiling(
        "lines of the core: top level without `hardware.py`, `sharding`, `compile`, `ir`, `passes`, `ranks`, `runtime`",
        _lines(text for name, text in SOURCES.items() if name.rpartition("/")[0].partition("/")[0] in CORE)
        - _lines([SOURCES["hardware.py"]]),
        23_767,
    ),
    Ceiling("lines of `tests/`", _lines(_texts("tests", "*.py").values()), 56_975),
    Ceiling("lines of `benchmarks/`", _lines(_texts("benchmarks", "*.py").values()), 4_050),
    Ceiling("words of `docs/`", sum(len(text.split()) for text in _texts("docs", "*.md").values()), 55_000),
)
