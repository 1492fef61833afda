"""An explanation in a few lines: as text, and as a table for terminals and notebooks."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxshard.errors import MissingExtraError
from fxshard.inspect.explanation import DYNAMO, Explanation, FrameExplanation
from fxshard.ir.journal import CAPTURED, Record

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("nodes", "collectives", "gathered", "reduced", "flop", "compute", "exposed", "peak")
"""The columns of numbers, of which `Row.cells` has one each."""

_NOTEBOOK_WIDTH = 160  # characters; a notebook scrolls what is wider than its cell


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the tables say of one graph.

    Attributes:
        frame: number of its frame.
        record: the graph.
        place: of the record among those of its stage, counted from 0.
        cells: one text for each of `COLUMNS`; empty where the graph has none of it.
    """

    frame: int
    record: Record
    place: int
    cells: tuple[str, ...]


def rows(explanation: Explanation) -> Iterator[Row]:
    """All graphs, in order."""
    for number, frame in enumerate(explanation.frames):
        for records in frame.graphs.values():
            for place, record in enumerate(records.values()):
                yield Row(frame=number, record=record, place=place, cells=_cells(frame, record))


def _cells(frame: FrameExplanation, record: Record) -> tuple[str, ...]:
    if record.stage == DYNAMO:
        return (f"{len(record.graph.nodes):,}", *("" for _ in COLUMNS[1:]))
    at = frame.stats_of(record).evaluate()
    return (
        f"{at.num_nodes:,}",
        launches(at.collectives),
        size(at.gathered_bytes),
        size(at.reduced_bytes),
        scaled(at.flops, "FLOP"),
        duration(at.compute_seconds),
        duration(at.exposed_seconds),
        size(at.peak_bytes),
    )


def text(explanation: Explanation) -> str:
    """The lines of `repr(explanation)`: one for the model, one for each stage."""
    lines = [headline(explanation)]
    for number, frame in enumerate(explanation.frames):
        for stage, records in frame.graphs.items():
            place = stage if len(explanation.frames) == 1 else f"frame {number} {stage}"
            lines.append(f"  {place:<8} {_stage(frame, list(records.values()))}")
    return "\n".join(lines)


def headline(explanation: Explanation) -> str:
    """Model, ranks, units and frames, on one line."""
    counted = (
        number(len(explanation.units), "unit"),
        f"world size {explanation.world_size}",
        number(len(explanation.frames), "frame"),
    )
    return f"Explanation of {explanation.model}: {', '.join(counted)}"


def _stage(frame: FrameExplanation, records: Sequence[Record]) -> str:
    first, last = (len(record.graph.nodes) for record in (records[0], records[-1]))
    parts = [f"{first:,} nodes" if first == last else f"{first:,} -> {last:,} nodes"]
    names = [record.name for record in records if record.name != CAPTURED and record.changed]
    if names:
        parts[0] += f" after {', '.join(names)}"
    if records[0].stage != DYNAMO:
        at = frame.stats_of(records[-1]).evaluate()
        parts += [launches(at.collectives)] * bool(at.collectives)
        parts += [f"{size(at.gathered_bytes)} gathered"] * bool(at.gathered_bytes)
    return "; ".join(parts)


def table(explanation: Explanation) -> Table:
    """All graphs as a `rich` table; a line is dim where the pass changed nothing."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape
        from rich.table import Table
    except ImportError as error:
        raise MissingExtraError("rich", "dev") from error
    made = Table(
        box=SIMPLE_HEAD, title=escape(headline(explanation)), title_justify="left", caption=escape(caption(explanation))
    )
    several = len(explanation.frames) > 1
    for name in (*["frame"] * several, "stage", "pass"):
        made.add_column(name, no_wrap=True)
    for name in COLUMNS:
        made.add_column(name, justify="left" if name == "collectives" else "right")
    for row in rows(explanation):
        if not row.place:
            made.add_section()
        place = (*[str(row.frame)] * several, row.record.stage) if not row.place else [""] * (1 + several)
        style = "" if row.record.changed else "dim"
        made.add_row(*(escape(cell) for cell in (*place, row.record.name, *row.cells)), style=style)
    return made


def html_table(explanation: Explanation) -> str:
    """`table` as HTML, for notebooks."""
    made = table(explanation)
    from rich.console import Console

    console = Console(record=True, width=_NOTEBOOK_WIDTH, file=io.StringIO())
    console.print(made)
    style = "white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def caption(explanation: Explanation) -> str:
    """What the numbers are."""
    return f"of one rank and one step; times are estimates for {explanation.hardware.name}"


def launches(collectives: Mapping[str, int]) -> str:
    """`2 all_gather, 1 reduce_scatter`."""
    return ", ".join(f"{count:,} {op}" for op, count in sorted(collectives.items()))


def number(count: int, word: str) -> str:
    """`1 unit`, `2 units`."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def size(nbytes: float) -> str:
    """Bytes, in a unit that keeps the number short; nothing for none."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}" if nbytes < 1000 * factor else f"{nbytes / factor:,.0f} {unit}"
    return f"{nbytes:,.0f} B" if nbytes else ""


def scaled(quantity: float, unit: str) -> str:
    """A quantity in powers of a thousand; nothing for none."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if quantity >= factor:
            return f"{quantity / factor:.3g} {prefix}{unit}"
    return f"{quantity:,.0f} {unit}" if quantity else ""


def duration(seconds: float) -> str:
    """Seconds, in a unit that keeps the number short; nothing for none."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us" if seconds else ""
