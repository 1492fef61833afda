"""An explanation in a few lines: as text, and as a table for terminals and notebooks."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxshard.cost.optimizer_step import OptimizerCost
from fxshard.inspect.captured import remark
from fxshard.inspect.explanation import DYNAMO, Explanation, FrameExplanation
from fxshard.ir.history import CAPTURED, PassResult

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

COLUMNS = ("nodes", "collectives", "gathered", "reduced", "flop", "compute", "exposed", "peak")
"""The columns of numbers, of which `GraphRow.cells` has one each."""

SCHEDULE_COLUMNS = ("schedule", "time", "exposed", "unsharded")
"""The columns of the table of schedules, after frame and stage."""

_NOTEBOOK_WIDTH = 160  # characters; a notebook scrolls what is wider than its cell


@dataclass(frozen=True, kw_only=True)
class GraphRow:
    """What the tables say of one graph, the `place`-th of its stage; a cell is empty where the graph has none of it."""

    frame: int
    record: PassResult
    place: int
    cells: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ScheduleRow:
    """What the tables say of the `place`-th schedule of a stage's graph; the last is the time that none can beat."""

    frame: int
    stage: str
    place: int
    is_bound: bool
    cells: tuple[str, str, str, str]


def rows(explanation: Explanation) -> Iterator[GraphRow]:
    """All graphs, in order."""
    for number, frame in enumerate(explanation.frames):
        for records in frame.graphs.values():
            for place, record in enumerate(records.values()):
                yield GraphRow(frame=number, record=record, place=place, cells=_cells(frame, record))


def _cells(frame: FrameExplanation, record: PassResult) -> tuple[str, ...]:
    if record.stage.kind == DYNAMO:
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


def schedule_rows(explanation: Explanation) -> Iterator[ScheduleRow]:
    """The schedules of all graphs that run, in order, each graph's bound last."""
    for number, frame in enumerate(explanation.frames):
        for stage in frame.scheduled:
            if not frame.stats_of(frame.running(stage)).collectives:
                continue
            lines = [
                (
                    found.name,
                    duration(found.seconds),
                    duration(found.exposed_seconds) or "0",
                    size(found.unsharded_peak_bytes),
                )
                for found in frame.schedules(stage)
            ]
            lines.append(("no schedule can beat", duration(frame.lower_bound(stage)), "", ""))
            for place, cells in enumerate(lines):
                yield ScheduleRow(frame=number, stage=stage, place=place, is_bound=place == len(lines) - 1, cells=cells)


def text(explanation: Explanation) -> str:
    """The lines of `repr(explanation)`: one for the model, one for each stage."""
    several = len(explanation.frames) > 1
    lines = {
        f"frame {number} {stage}" if several else stage: _stage(frame, list(records.values()))
        for number, frame in enumerate(explanation.frames)
        for stage, records in frame.graphs.items()
    }
    width = max(map(len, lines))
    stages = [f"  {place:<{width}} {line}" for place, line in lines.items()]
    return "\n".join([headline(explanation), *stages, *_remarks(explanation)])


def headline(explanation: Explanation) -> str:
    """Model, ranks, units and frames, on one line."""
    replicas = f"{explanation.replicas} replicas of " if explanation.replicas > 1 else ""
    counted = (
        number(len(explanation.units) + len(explanation.uncaptured), "unit"),
        f"{replicas}world size {explanation.world_size}",
        *(f"{axis.size} ranks of {axis.name}" for axis in explanation.model_axes),
        number(len(explanation.frames), "frame"),
    )
    said = f"Explanation of {explanation.model}: {', '.join(counted)}"
    if not explanation.offloaded:
        return said
    places = f"{size(explanation.device_bytes) or '0 B'} on the device, {size(explanation.host_bytes)} on the host"
    return f"{said}; shards of a rank: {places} ({', '.join(explanation.offloaded)})"


def _stage(frame: FrameExplanation, records: Sequence[PassResult]) -> str:
    first, last = (len(record.graph.nodes) for record in (records[0], records[-1]))
    parts = [f"{first:,} nodes" if first == last else f"{first:,} -> {last:,} nodes"]
    names = [record.name for record in records if record.name != CAPTURED and record.changed]
    if names:
        parts[0] += f" after {', '.join(names)}"
    if records[0].stage.kind != DYNAMO:
        at = frame.stats_of(records[-1]).evaluate()
        parts += [launches(at.collectives)] * bool(at.collectives)
        parts += [f"{size(at.gathered_bytes)} gathered"] * bool(at.gathered_bytes)
    return "; ".join(parts)


def tables(explanation: Explanation) -> Group:
    """All graphs as a `rich` table; below it, if any graph launches a collective, their schedules as another."""
    from rich.console import Group

    graphs, schedules = _table_of_graphs(explanation), table_of_schedules(explanation)
    return Group(graphs) if schedules is None else Group(graphs, "", schedules)


def _table_of_graphs(explanation: Explanation) -> Table:
    """A line is dim where the pass changed nothing."""
    from rich.markup import escape

    several_frames = len(explanation.frames) > 1
    made = _table(headline(explanation), several_frames)
    made.caption = escape(caption(explanation, ";\n"))
    made.add_column("pass", no_wrap=True)
    for name in COLUMNS:
        made.add_column(name, justify="left" if name == "collectives" else "right")
    for row in rows(explanation):
        place = _place(row.place, row.frame, str(row.record.stage), made, several_frames)
        style = "" if row.record.changed else "dim"
        made.add_row(*(escape(cell) for cell in (*place, row.record.name, *row.cells)), style=style)
    return made


def table_of_schedules(explanation: Explanation) -> Table | None:
    """The schedules as a `rich` table; a stage's bound is dim. `None` where no graph launches a collective."""
    schedules = list(schedule_rows(explanation))
    if not schedules:
        return None
    several_frames = len(explanation.frames) > 1
    made = _table("Schedules", several_frames)
    for name in SCHEDULE_COLUMNS:
        made.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    for row in schedules:
        place = _place(row.place, row.frame, row.stage, made, several_frames)
        made.add_row(*place, *row.cells, style="dim" if row.is_bound else "")
    return made


def _table(title: str, several_frames: bool) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, title=escape(title), title_justify="left", collapse_padding=True)
    for name in (*["frame"] * several_frames, "stage"):
        made.add_column(name, no_wrap=True)
    return made


def _place(place: int, frame: int, stage: str, made: Table, several_frames: bool) -> tuple[str, ...]:
    """The first cells of a row: where it belongs, on the first row of a stage; that row begins a section of `made`."""
    if place:
        return ("",) * (1 + several_frames)
    made.add_section()
    return (*[str(frame)] * several_frames, stage)


def html_tables(explanation: Explanation) -> str:
    """`tables` as HTML, for notebooks."""
    made = tables(explanation)
    from rich.console import Console

    console = Console(record=True, width=_NOTEBOOK_WIDTH, file=io.StringIO())
    console.print(made)
    style = "white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def caption(explanation: Explanation, between: str = "; ") -> str:
    """What the numbers are."""
    numbers = f"of one rank and one step; times are estimates for {explanation.hardware.label}"
    return between.join([numbers, *_remarks(explanation)])


def _remarks(explanation: Explanation) -> Iterator[str]:
    """What "auto" chose, which calls share a frame, what no frame reads, and kernels that may be others elsewhere."""
    if explanation.choice:
        yield str(explanation.choice)
    for place, frame in enumerate(explanation.frames):
        if len(frame.calls) > 1:
            first, last = (call[-1] for call in (frame.calls[0], frame.calls[-1]))
            yield f"{len(frame.calls):,} calls share frame {place}: {first} to {last}"
    if len(explanation.calls) > 1:
        seconds, exposed = map(duration, explanation.step)
        yield f"all {len(explanation.calls):,} calls in a row: {seconds}, {exposed or 'nothing'} of it exposed"
    for cost in itertools.chain.from_iterable(explanation.optimizers.values()):
        yield step_text(cost)
    if explanation.uncaptured:
        names, total = ", ".join(explanation.uncaptured), sum(explanation.uncaptured.values())
        yield f"no frame reads {names}: {size(total)} are gathered where uncompiled code reads them"
    running = [frame.running(stage).graph for frame in explanation.frames for stage in frame.scheduled]
    if foreign := remark(explanation.device, explanation.hardware, running):
        yield foreign


def step_text(cost: OptimizerCost) -> str:
    """What a step of an optimizer costs the rank with most of each, and how much more that is than the mean."""
    work = f"{duration(cost.seconds)} a step, {duration(max(cost.computing))} of it compute"
    if len(cost.computing) > 1:
        work += f" ({max(cost.computing) / (sum(cost.computing) / len(cost.computing)):.2f} of the mean)"
    parts = [work, scaled(max(cost.flops), "FLOP"), f"{size(max(cost.state_bytes)) or 'no'} state"]
    if cost.matrices is not None:
        parts += [f"{size(cost.received_bytes) or '0 B'} received, {duration(cost.exposed) or 'nothing'} exposed"]
        parts += [f"{size(max(cost.buffer_bytes)) or '0 B'} of buffers"]
    return f"{cost.matrices.title if cost.matrices else cost.name}: {', '.join(part for part in parts if part)}"


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
