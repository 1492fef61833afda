"""What bounds a step, read off a trace of torch's profiler: small enough to be committed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST: Final = ("cpu_op",)  # what there is without a GPU
_TOP, _GAPS, _NAME = 12, 6, 90  # kernels and gaps that are kept, and characters of a name

Span = tuple[float, float]


def summary(events: Iterable[dict[str, Any]], steps: int, *, on_gpu: bool) -> dict[str, Any]:
    """Add up a Chrome trace, per step; times in ms.

    Args:
        events: `traceEvents` of the file.
        steps: that were profiled.
        on_gpu: whether kernels are what counts; operators of the CPU if not.

    Returns:
        `span_ms`, from the first kernel to the last; `lanes`, one per stream (or thread, without a GPU), busiest with
        kernels first: `kernels` and `busy_ms`; `main_idle_ms` of the first lane, split into `while_others_work_ms`
        (it waits for another stream) and `while_nothing_works_ms` (it waits for the host); `top`, the kernels that take
        the most; `gaps`, the longest times in which the first lane does nothing.
    """
    done = [event for event in events if event.get("ph") == "X" and event.get("dur")]
    kernels = [e for e in done if e.get("cat") in (_ON_DEVICE if on_gpu else _ON_HOST)]
    if on_gpu and not kernels:
        raise RuntimeError("the trace has no kernels: torch's profiler could not watch the GPU.")
    lanes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in sorted(kernels, key=lambda e: float(e["ts"])):
        lanes[_lane(event)].append(event)
    if not lanes:
        return {"span_ms": 0.0, "lanes": [], "top": [], "gaps": []}
    order = sorted(lanes, key=lambda lane: -len(lanes[lane]))
    spans = {lane: _merged(map(_span, lanes[lane])) for lane in order}
    everything = _merged(span for lane in order for span in spans[lane])
    whole = everything[0][0], everything[-1][1]
    main = spans[order[0]]
    others = _merged(span for lane in order[1:] for span in spans[lane])
    idle = _between(main, whole)
    waiting = sum(_overlap(gap, others) for gap in idle)
    per = 1e-3 / steps
    return {
        "span_ms": (whole[1] - whole[0]) * per,
        "lanes": [
            {"lane": lane, "kernels": len(lanes[lane]) / steps, "busy_ms": _length(spans[lane]) * per} for lane in order
        ],
        "main_idle_ms": _length(idle) * per,
        "while_others_work_ms": waiting * per,
        "while_nothing_works_ms": (_length(idle) - waiting) * per,
        "top": _top(lanes, order, per, steps),
        "gaps": _longest(idle, lanes[order[0]], others),
    }


def _top(lanes: dict[str, list[dict[str, Any]]], order: Sequence[str], per: float, steps: int) -> list[dict[str, Any]]:
    total: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for lane in order:
        for event in lanes[lane]:
            key = lane, str(event["name"])[:_NAME]
            total[key] += event["dur"]
            count[key] += 1
    return [
        {"kernel": name, "lane": lane, "launches": count[lane, name] / steps, "ms": took * per}
        for (lane, name), took in total.most_common(_TOP)
    ]


def _longest(idle: list[Span], events: Sequence[dict[str, Any]], others: list[Span]) -> list[dict[str, Any]]:
    """The longest gaps of a lane, with the kernels around them; of one step each, not per step."""
    found = []
    for gap in sorted(idle, key=lambda span: span[0] - span[1])[:_GAPS]:
        before = [e for e in events if e["ts"] + e["dur"] <= gap[0]]
        after = [e for e in events if e["ts"] >= gap[1]]
        found.append(
            {
                "ms": 1e-3 * (gap[1] - gap[0]),
                "others_work_ms": 1e-3 * _overlap(gap, others),
                "after": str(before[-1]["name"])[:_NAME] if before else "",
                "before": str(after[0]["name"])[:_NAME] if after else "",
            }
        )
    return found


def _lane(event: dict[str, Any]) -> str:
    stream = event.get("args", {}).get("stream")
    return f"thread {event.get('tid')}" if stream is None else f"stream {stream}"


def _span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The same time, in spans that do not touch."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _between(spans: list[Span], whole: Span) -> list[Span]:
    """What is left of `whole`."""
    edges = [whole[0], *(edge for span in spans for edge in span), whole[1]]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]


def _overlap(span: Span, others: list[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def _length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)
