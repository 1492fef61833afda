"""A plan as one self-contained page: the runs, what each stream does when, memory over time, and peak against step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fxshard.cost.step_record import MemoryOverTime, StepRecord
from fxshard.inspect import html
from fxshard.inspect.tables import duration, size
from fxshard.plan.plan import COLUMNS, Plan, PlannedRun

TEMPLATE = "page.html.jinja"
_SAMPLES = 4000  # of memory over time, each the worst moment of its part of the step
_LISTED = 12  # launches that are exposed longest

ParetoPoint = tuple[float, float]
"""Peak bytes and seconds of a step that a solver found."""


def save(plan: Plan, path: Path, pareto: Sequence[ParetoPoint] = ()) -> None:
    """Write the page; raise `ConfigError` if that fails, `MissingExtraError` without jinja2."""
    html.write(path, page(plan, pareto))


def page(plan: Plan, pareto: Sequence[ParetoPoint] = ()) -> str:
    """The whole page, of the plan's runs and the points that no other plan is better than in both."""
    return html.rendered(
        TEMPLATE,
        __package__,
        title=plan.model,
        facts=[("device", plan.hardware.name), ("memory", f"{plan.hardware.memory_gib:g} GiB")],
        columns=COLUMNS,
        rows=[(run.cells, run.cost.fits) for run in plan.runs],
        data={"runs": [_run(run) for run in plan.runs], "pareto": [list(point) for point in pareto]},
    )


def _run(run: PlannedRun) -> dict[str, Any]:
    cost, record = run.cost, run.cost.record
    held = _thinned(record.memory(), cost.seconds)
    return {
        "name": run.name,
        "seconds": cost.seconds,
        "peak": cost.peak_bytes,
        "capacity": cost.capacity,
        "fits": cost.fits,
        **_tracks(record),
        "memory": {
            "us": [_us(each) for each in held.seconds],
            "categories": held.categories,
            "bytes": held.nbytes.T.astype(int).tolist(),
        },
        "exposed": [
            [each.label, each.stage, each.node, duration(each.seconds), f"{each.seconds / cost.seconds:.2%}"]
            for each in record.exposed[:_LISTED]
        ],
        "worst": [[name, size(nbytes)] for name, nbytes in cost.memory.items() if nbytes],
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)


def _tracks(record: StepRecord) -> dict[str, Any]:
    """What the streams do, a row for each kernel, graph and launch; `texts` has once what is said of them."""
    texts: dict[str, int] = {}

    def text(what: str) -> int:
        return texts.setdefault(what, len(texts))

    def graph(run: int) -> str:
        return f"{record.runs[run].graph.stage} {record.runs[run].name or 'model'}"

    streams = list(dict.fromkeys(each.stream for each in record.launches))
    kernels = [
        [_us(each.start), _us(each.end), text(each.work.node.name), text(each.work.kind), text(graph(each.run))]
        for each in record.kernels()
    ]
    stands = [
        [_us(each.start), _us(each.end), text(each.name), text(each.name.split()[0]), text("")]
        for each in record.stands
    ]
    graphs = [
        [_us(start), _us(end), text(record.runs[run].name or "model"), text(record.runs[run].graph.stage)]
        for run, (start, end) in record.spans.items()
        if record.runs[run].name or not any(each.name for each in record.runs)
    ]
    launches = []
    for each in record.launches:
        what = (text(record.label(each)), text(record.runs[each.run].graph.stage), 1 + streams.index(each.stream))
        needed = -1.0 if each.needed is None else _us(each.needed)
        launches.append([_us(each.start), _us(each.end), *what, _us(each.launched), needed, _us(each.exposed)])
    return {
        "streams": streams,
        "kernels": kernels + stands,
        "graphs": graphs,
        "launches": launches,
        "texts": list(texts),
    }


def _thinned(held: MemoryOverTime, seconds: float) -> MemoryOverTime:
    """At most `_SAMPLES` moments, of each part of the step that in which most is held."""
    parts = np.minimum((held.seconds / seconds * _SAMPLES).astype(int), _SAMPLES - 1)
    order = np.lexsort((held.nbytes.sum(1), parts))
    worst = order[np.append(np.diff(parts[order]) > 0, True)]
    return MemoryOverTime(held.seconds[worst], held.categories, held.nbytes[worst])
