"""What runs beside what, in a small trace written by hand: two blocks, forward and backward."""

from __future__ import annotations

from typing import Any

from tests.gpu.streams import Shape, check_order, overlap_problems
from tests.gpu.trace import Event, hidden_share, issued, kernels, on_their_stream, products, transfers, units_beside

SHAPE = Shape(width=8, first=10, step=4, num_blocks=2, rows=7)
MAIN, LINK = 7, 20
PID, FORWARD, BACKWARD = 1, 11, 12


class Trace:
    """Writes events: what the host did, 1 us each, and what it launched."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.clock = 0.0
        self.thread = FORWARD
        self._correlation = 0

    def _host(self, cat: str, name: str, start: float, **args: Any) -> None:
        place = {"ph": "X", "pid": PID, "tid": self.thread}
        self.events.append({**place, "cat": cat, "name": name, "ts": start, "dur": 1.0, "args": args})

    def _launch(self, name: str, stream: int, start: float, end: float) -> None:
        self._correlation += 1
        self._host("cuda_runtime", "cudaLaunchKernel", self.clock + 0.5, correlation=self._correlation)
        args = {"stream": stream, "correlation": self._correlation}
        device = {"ph": "X", "cat": "kernel", "pid": 0, "tid": stream, "name": name}
        self.events.append({**device, "ts": start, "dur": end - start, "args": args})

    def transfer(self, verb: str, unit: str, start: float, end: float, *, stream: int = LINK) -> None:
        """A collective for a unit, of two kernels, behind a cast on the main stream."""
        self._host("user_annotation", f"fxshard::{verb}({unit})", self.clock)
        self._launch("cast", MAIN, start - 5, start)
        middle = (start + end) / 2
        self._launch("paced_copy", stream, start, middle)
        self._launch("paced_copy", stream, middle, end)
        self.clock += 2

    def product(self, hidden: int, start: float, end: float) -> None:
        """A matrix product of the block with that hidden size."""
        dims = [[SHAPE.rows, SHAPE.width], [SHAPE.width, hidden], []]
        self._host("cpu_op", "aten::mm", self.clock, **{"Input Dims": dims})
        self._launch("nvjet_tst_128x64", MAIN, start, end)
        self.clock += 2

    def sleep(self, start: float, end: float) -> None:
        """The main stream does something else."""
        self._launch("at::cuda::spin_kernel(long)", MAIN, start, end)
        self.clock += 2


def step(*, late: bool = False) -> list[Event]:
    """Gathers one ahead, or `late`: launched ahead, but carried when the compute beside them is over."""
    trace, delay = Trace(), 100.0 if late else 0.0
    trace.transfer("unshard", "blocks.0", 100, 190)
    trace.transfer("unshard", "blocks.1", 200 + delay, 280 + delay)
    trace.product(10, 200, 300)
    trace.product(14, 300 + 2 * delay, 400 + 2 * delay)
    trace.thread, trace.clock = BACKWARD, trace.clock + 10
    trace.transfer("unshard", "blocks.1", 1000, 1090)
    trace.transfer("unshard", "blocks.0", 1100, 1180)
    trace.product(14, 1100, 1300)
    trace.transfer("reduce", "blocks.1", 1300, 1390)
    trace.product(10, 1300, 1500)
    trace.transfer("reduce", "blocks.0", 1500, 1590)
    return trace.events


def test_finds_products_and_transfers_with_their_units() -> None:
    found = kernels(step())
    compute = products(found, SHAPE.unit_of)
    assert [(work.unit, work.span.start) for work in compute] == [
        ("blocks.0", 200),
        ("blocks.1", 300),
        ("blocks.1", 1100),
        ("blocks.0", 1300),
    ]
    moved = [(work.verb, work.unit, work.span.start, work.span.end) for work in transfers(found, compute)]
    assert moved == [
        ("unshard", "blocks.0", 100, 190),
        ("unshard", "blocks.1", 200, 280),
        ("unshard", "blocks.1", 1000, 1090),
        ("unshard", "blocks.0", 1100, 1180),
        ("reduce", "blocks.1", 1300, 1390),
        ("reduce", "blocks.0", 1500, 1590),
    ]


def test_says_what_a_transfer_hides_behind() -> None:
    found = kernels(step())
    compute = products(found, SHAPE.unit_of)
    first, second, *_ = transfers(found, compute)
    busy = on_their_stream(found, compute)
    assert (hidden_share(first, busy), units_beside(first, compute)) == (0.0, set())
    assert (hidden_share(second, busy), units_beside(second, compute)) == (1.0, {"blocks.0"})


def test_finds_nothing_wrong_with_transfers_one_ahead() -> None:
    assert overlap_problems(step(), SHAPE) == []


def test_names_a_transfer_that_nothing_hides() -> None:
    (problem,) = overlap_problems(step(late=True), SHAPE)
    assert problem == "unshard blocks.1: 0% hidden, beside [], not blocks.0"


def test_reads_the_order_of_the_host() -> None:
    order = issued(step(), SHAPE.unit_of)
    assert order[:4] == [
        ("unshard", "blocks.0"),
        ("unshard", "blocks.1"),
        ("compute", "blocks.0"),
        ("compute", "blocks.1"),
    ]
    check_order(step(), SHAPE)
