"""An explanation as one self-contained page: passes, their differences side by side, collectives by unit.

The page holds every distinct line of all graphs once; its script makes the differences where they are looked at.
"""

from __future__ import annotations

import importlib.resources
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxshard.cost.symbols import evaluate
from fxshard.errors import ConfigError, MissingExtraError
from fxshard.inspect import tables
from fxshard.inspect.explanation import Explanation, FrameExplanation
from fxshard.ir.history import PassResult

TEMPLATE, STYLE = "page.html.jinja", "page.css"


@dataclass(kw_only=True)
class Launches:
    """Launches of one kind for one unit in one graph, added up."""

    frame: int
    stage: str
    unit: str
    op: str
    dtype: str
    count: int = 0
    nbytes: float = 0
    seconds: float = 0
    exposed: float = 0  # seconds that compute waits for them
    why: tuple[str, ...] = ()  # what the passes said of them, newest last


def save(explanation: Explanation, path: Path) -> None:
    """Write the page; see `Explanation.save_html`."""
    write(path, page(explanation))


def write(path: Path, text: str) -> None:
    """Write a page to a file; raise `ConfigError` if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the page cannot be written to {path}: {error.strerror}.") from error


def rendered(template: str, package: str, **values: Any) -> str:
    """Fill in a template of a package; `style` is the style sheet that all pages share."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise MissingExtraError("jinja2", "report") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text, style = (_resource(*each) for each in ((package, template), (__package__, STYLE)))
    return environment.from_string(text).render(style=Markup(style), **values)


def _resource(package: str, name: str) -> str:
    return (importlib.resources.files(package) / name).read_text(encoding="utf-8")


def page(explanation: Explanation) -> str:
    """The whole page."""
    launches = list(launches_by_unit(explanation))
    return rendered(
        TEMPLATE,
        __package__,
        title=explanation.model,
        headline=tables.headline(explanation),
        facts=_facts(explanation),
        tiles=_tiles(explanation),
        several_frames=len(explanation.frames) > 1,
        stages=_stages(explanation),
        schedules=[
            list(rows)
            for _, rows in itertools.groupby(tables.schedule_rows(explanation), lambda row: (row.frame, row.stage))
        ],
        schedule_columns=tables.SCHEDULE_COLUMNS,
        launches=launches,
        longest=max((time for row in launches for time in (row.seconds, row.exposed)), default=0) or 1,
        size=tables.size,
        duration=tables.duration,
        hardware=explanation.hardware.label,
        caption=tables.caption(explanation),
        data=graphs_data(explanation),
    )


def graphs_data(explanation: Explanation) -> dict[str, Any]:
    """All graphs for the page's script: lines, texts as lists of line numbers, and which record has which text."""
    lines: dict[str, int] = {}
    texts: dict[int, list[int]] = {}
    frames: list[list[dict[str, Any]]] = []
    for frame in explanation.frames:
        stages = []
        for stage, records in frame.graphs.items():
            for record in records.values():
                if id(record.graph) not in texts:
                    ids = (lines.setdefault(line, len(lines)) for line in str(record).split("\n"))
                    texts[id(record.graph)] = list(ids)
            place = list(texts)
            stages.append({"name": stage, "records": [_record(r, place.index(id(r.graph))) for r in records.values()]})
        frames.append(stages)
    return {"lines": list(lines), "texts": list(texts.values()), "frames": frames}


def _record(record: PassResult, text: int) -> dict[str, Any]:
    return {
        "name": record.name,
        "description": record.description,
        "changed": record.changed,
        "reasons": record.reasons(),
        "text": text,
    }


def launches_by_unit(explanation: Explanation) -> Iterator[Launches]:
    """The collectives of the graphs that run, added up by unit and kind, in the order of their first launch."""
    for number, frame in enumerate(explanation.frames):
        for stage in frame.scheduled:
            yield from _launches_of(number, frame, stage)


def _launches_of(number: int, frame: FrameExplanation, stage: str) -> Iterable[Launches]:
    record, why = frame.running(stage), frame.why(stage)
    at, ran = frame.stats_of(record), str(record.stage)
    found: dict[tuple[str, str, str], Launches] = {}
    for cost in frame.collectives(ran):
        unit = "not of a unit" if cost.unit is None else cost.unit or "root"
        row = found.setdefault(
            (unit, cost.op, cost.dtype), Launches(frame=number, stage=ran, unit=unit, op=cost.op, dtype=cost.dtype)
        )
        row.count += 1
        row.nbytes += evaluate(cost.nbytes, at.world_size, at.hints)
        row.seconds += evaluate(cost.seconds, at.world_size, at.hints)
        row.exposed += cost.exposed_seconds
        row.why = tuple(dict.fromkeys((*row.why, *why[cost.node])))
    return found.values()


def _facts(explanation: Explanation) -> list[tuple[str, str]]:
    return [
        ("world size", str(explanation.world_size)),
        ("units", str(len(explanation.units))),
        ("frames", str(len(explanation.frames))),
        ("captured for", explanation.device),
        ("estimated for", explanation.hardware.label),
        ("torch", torch.__version__),
    ]


def _tiles(explanation: Explanation) -> list[tuple[str, str, str]]:
    stats = [
        frame.stats_of(frame.history.last(stage)).evaluate()
        for frame in explanation.frames
        for stage in frame.final_stages()
    ]
    counts: Counter[str] = Counter()
    for at in stats:
        counts.update(at.collectives)
    gathered, reduced, flops, compute, comm, exposed = (
        sum(getattr(at, name) for at in stats)
        for name in ("gathered_bytes", "reduced_bytes", "flops", "compute_seconds", "comm_seconds", "exposed_seconds")
    )
    peak = max((at.peak_bytes for at in stats), default=0)
    unsharded = max((at.unsharded_peak_bytes for at in stats), default=0)
    return [
        ("gathered", tables.size(gathered) or "nothing", tables.number(counts["all_gather"], "all_gather")),
        ("reduced", tables.size(reduced) or "nothing", tables.number(counts["reduce_scatter"], "reduce_scatter")),
        ("compute", tables.duration(compute) or "none", tables.scaled(flops, "FLOP")),
        ("exposed", tables.duration(exposed) or "none", f"of {tables.duration(comm) or 'no'} communication"),
        ("peak", tables.size(peak) or "none", f"{tables.size(unsharded) or 'nothing'} of it unsharded"),
    ]


def _stages(explanation: Explanation) -> list[dict[str, Any]]:
    stages: list[dict[str, Any]] = []
    for row in tables.rows(explanation):
        stage = str(row.record.stage)
        if not row.place:
            stages.append({"frame": row.frame, "name": stage, "rows": []})
        before = [*explanation.frames[row.frame].graphs[stage]][max(0, row.place - 1)]
        stages[-1]["rows"].append(
            {
                "name": row.record.name,
                "description": row.record.description,
                "changed": row.record.changed,
                "before": before,
                "cells": list(zip(tables.COLUMNS, row.cells, strict=True)),
                "seconds": tables.duration(row.record.seconds),
                "declined": len(row.record.declined),
            }
        )
    return stages
