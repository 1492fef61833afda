"""Planned steps as a trace that https://ui.perfetto.dev and chrome://tracing open: a process for each run.

A process has a track for each stream, with an arrow from where compute comes to a launch through what the link does to
where compute needs it, and counters of memory by category.

Source: "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fxshard.cost.step import COMPUTE, Interval
from fxshard.cost.step_record import StepRecord
from fxshard.errors import ConfigError
from fxshard.plan.plan import Plan

_TraceEvent = dict[str, Any]


def save(plan: Plan, path: Path) -> None:
    """Write the trace of a plan's runs, compressed if the file's name ends in `.gz`."""
    runs = [(run.name, run.cost.record) for run in plan.runs]
    text = json.dumps({"traceEvents": list(events(runs)), "displayTimeUnit": "ms"}).encode()
    try:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    except OSError as error:
        raise ConfigError(f"the trace cannot be written to {path}: {error.strerror}.") from error


def events(runs: Iterable[tuple[str, StepRecord]]) -> Iterator[_TraceEvent]:
    """Yield the events of runs, times in microseconds."""
    for pid, (name, record) in enumerate(runs, start=1):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        streams = [COMPUTE, *dict.fromkeys(each.stream for each in record.launches)]
        for tid, stream in enumerate(streams, start=1):
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": stream}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        yield from ({"pid": pid, "tid": 1, **each} for each in (*_graphs(record), *_compute(record)))
        for number, each in enumerate(record.launches):
            place = {"pid": pid, "tid": 1 + streams.index(each.stream)}
            yield {**place, **_launch(record, each)}
            yield from ({"tid": 1, **flow} for flow in _arrow(each, pid << 32 | number, place))
        yield from ({"pid": pid, **each} for each in _memory(record))


def _slice(name: str, category: str, start: float, end: float, **args: Any) -> _TraceEvent:
    first, last = round(start * 1e9), round(end * 1e9)  # nested slices must not differ by rounding
    return {"ph": "X", "name": name, "cat": category, "ts": first / 1e3, "dur": (last - first) / 1e3, "args": args}


def _graphs(record: StepRecord) -> Iterator[_TraceEvent]:
    """A slice around the kernels of each graph; that of the model is around those of its blocks."""
    for run, span in record.spans.items():
        graph, name = record.runs[run]
        yield _slice(f"{graph.stage} {name or 'model'}", "graph", *span)


def _compute(record: StepRecord) -> Iterator[_TraceEvent]:
    for kernel in record.kernels():
        work, run = kernel.work, record.runs[kernel.run]
        args = {"op": str(work.node.target), "FLOPs": work.flops, "bytes": work.nbytes, "alone us": work.seconds * 1e6}
        yield _slice(work.node.name, work.kind, kernel.start, kernel.end, block=run.name, stage=run.graph.stage, **args)
    for each in record.stands:
        yield _slice(each.name, each.name.split()[0], each.start, each.end)


def _launch(record: StepRecord, each: Interval) -> _TraceEvent:
    timeline, stage = record.runs[each.run].graph.timeline, record.runs[each.run].graph.stage
    args: dict[str, Any] = {"stage": stage, "node": each.name, "exposed us": each.exposed * 1e6}
    if each.node in timeline.launches:
        args["bytes"] = timeline.launched_bytes[each.node]
    return _slice(record.label(each), "launch", each.start, each.end, **args)


def _arrow(each: Interval, number: int, place: _TraceEvent) -> Iterator[_TraceEvent]:
    flow = {"pid": place["pid"], "name": "launch", "cat": "launch", "id": number, "bp": "e"}
    yield {**flow, "ph": "s", "ts": round(each.launched * 1e9) / 1e3}
    steps = "f" if each.needed is None else "t"  # a launch that no graph waits for is where its arrow ends
    yield {**flow, "ph": steps, "ts": round(each.start * 1e9) / 1e3, "tid": place["tid"]}
    if each.needed is not None:
        yield {**flow, "ph": "f", "ts": max(round(each.needed * 1e9), round(each.start * 1e9)) / 1e3}


def _memory(record: StepRecord) -> Iterator[_TraceEvent]:
    held = record.memory()
    for seconds, row in zip(held.seconds.tolist(), held.nbytes.tolist(), strict=True):
        args = {name: int(nbytes) for name, nbytes in zip(held.categories, row, strict=True)}
        yield {"ph": "C", "name": "memory", "ts": seconds * 1e6, "args": {"all": int(sum(row)), **args}}
