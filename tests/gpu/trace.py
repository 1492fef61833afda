"""What ran beside what, read from a Chrome trace of torch.profiler: dicts in, intervals out.

[Note: who launched a kernel]
A kernel shares the number `correlation` with the call of the CUDA runtime or driver that launched it. That call lies
within the ranges and operators that were open on its thread, so they tell for whom the kernel is: fxshard opens
`fxshard::unshard(blocks.0)` around launches of units while a profiler runs, and the shapes of a product's inputs tell
the block whose hidden size they have.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Event = Mapping[str, Any]
"""One of a trace's `traceEvents`."""

PRODUCTS: Final = frozenset({"aten::mm", "aten::addmm", "aten::bmm"})
RANGE: Final = re.compile(r"fxshard::(?P<verb>unshard|reduce|wait)\((?P<unit>.*)\)")
_CALLS: Final = ("cuda_runtime", "cuda_driver")
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_RANGES: Final = ("cpu_op", "user_annotation")


@dataclass(frozen=True, kw_only=True)
class Span:
    name: str  # of the kernel, operator or range
    start: float  # microseconds, on the trace's clock
    end: float  # likewise
    stream: int | None = None  # of a kernel; `None` for what the host did
    shapes: tuple[tuple[int, ...], ...] = ()  # of an operator's inputs, where they were recorded
    around: tuple[Span, ...] = ()  # operators and ranges that were open when it was launched, outermost first

    def overlap(self, other: Span) -> float:
        """Microseconds that both run."""
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


@dataclass(frozen=True, kw_only=True)
class Work:
    verb: str  # "unshard", "reduce", "wait" or "compute"
    unit: str  # its name; "" where the trace does not say
    span: Span  # when; of a transfer from the beginning of its first kernel to the end of its last one


def host_spans(events: Iterable[Event]) -> dict[tuple[Any, Any], list[Span]]:
    """Operators and ranges of each thread, in the order in which they began."""
    found: dict[tuple[Any, Any], list[Span]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _RANGES:
            found[event["pid"], event["tid"]].append(_span(event, shapes=_shapes(event)))
    return {thread: sorted(spans, key=lambda span: (span.start, -span.end)) for thread, spans in found.items()}


def kernels(events: Sequence[Event]) -> list[Span]:
    """Kernels and copies, in the order in which they began; see [Note: who launched a kernel]."""
    on_host = host_spans(events)
    calls = {_correlation(event): event for event in events if event.get("cat") in _CALLS}
    found = []
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            call = calls.get(_correlation(event))
            around = _open_at(call, on_host) if call is not None else ()
            found.append(_span(event, stream=event.get("args", {}).get("stream"), around=around))
    return sorted(found, key=lambda span: span.start)


def products(found: Iterable[Span], unit_of: Callable[[Span], str]) -> list[Work]:
    """The kernels of matrix products.

    Args:
        found: kernels.
        unit_of: tells the unit of an operator from its shapes.
    """
    made = []
    for kernel in found:
        inside = [op for op in kernel.around if op.name in PRODUCTS]
        if inside:
            made.append(Work(verb="compute", unit=unit_of(inside[-1]), span=kernel))
    return made


def transfers(found: Sequence[Span], compute: Iterable[Work]) -> list[Work]:
    """The transfers of units, each from its first kernel to its last one.

    Args:
        found: kernels.
        compute: of `products`; what runs on their streams (casts, copies) is no transfer.
    """
    main = {work.span.stream for work in compute}
    by_range: dict[tuple[str, float], list[Span]] = defaultdict(list)
    for kernel in found:
        ranges = [span for span in kernel.around if RANGE.fullmatch(span.name)]
        if ranges and kernel.stream not in main:
            by_range[ranges[-1].name, ranges[-1].start].append(kernel)
    made = []
    for (name, _), inside in by_range.items():
        match = RANGE.fullmatch(name)
        assert match is not None
        last = max(inside, key=lambda span: span.end)
        first = next(span for span in inside if span.stream == last.stream)  # casts may have a stream of their own
        span = Span(name=first.name, start=first.start, end=last.end, stream=last.stream)
        made.append(Work(verb=match["verb"], unit=match["unit"], span=span))
    return sorted(made, key=lambda work: work.span.start)


def issued(events: Iterable[Event], unit_of: Callable[[Span], str]) -> list[tuple[str, str]]:
    """What the host issued, (verb, unit), in order; products of one unit that follow one another count once."""
    spans = sorted((span for thread in host_spans(events).values() for span in thread), key=lambda span: span.start)
    found: list[tuple[str, str]] = []
    for span in spans:
        match = RANGE.fullmatch(span.name)
        if match is not None:
            found.append((match["verb"], match["unit"]))
        elif span.name in PRODUCTS and found[-1:] != [each := ("compute", unit_of(span))]:
            found.append(each)
    return found


def on_their_stream(found: Iterable[Span], compute: Iterable[Work]) -> list[Span]:
    """All kernels on the stream of the products; what lies between them is compute as well."""
    main = {work.span.stream for work in compute}
    return [kernel for kernel in found if kernel.stream in main]


def hidden_share(work: Work, busy: Iterable[Span]) -> float:
    """The share of a transfer's time during which one of these kernels runs; those of one stream do not overlap."""
    return sum(work.span.overlap(kernel) for kernel in busy) / (work.span.end - work.span.start)


def units_beside(work: Work, compute: Iterable[Work]) -> set[str]:
    """The units whose products run during a transfer."""
    return {product.unit for product in compute if work.span.overlap(product.span) > 0}


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _open_at(call: Event, on_host: Mapping[tuple[Any, Any], list[Span]]) -> tuple[Span, ...]:
    spans = on_host.get((call["pid"], call["tid"]), [])
    return tuple(span for span in spans if span.start <= call["ts"] < span.end)


def _span(event: Event, **more: Any) -> Span:
    return Span(name=event["name"], start=event["ts"], end=event["ts"] + event.get("dur", 0), **more)


def _shapes(event: Event) -> tuple[tuple[int, ...], ...]:
    dims = event.get("args", {}).get("Input Dims", [])
    return tuple(tuple(dim) for dim in dims if isinstance(dim, list) and all(isinstance(size, int) for size in dim))
