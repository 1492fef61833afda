"""What only a GPU runs, as far as it goes without one: the engine of the emulated link on mock streams."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxshard.testing import cuda_engine, cuda_kernel
from fxshard.testing.cuda_engine import CudaEngine
from fxshard.testing.link_engine import Move, Speed
from tests.cross_cuda.clocks import MockEvent, MockStream, Streams
from tests.cross_cuda.dry_run import dry_run
from tests.cross_cuda.lane import installed

pytestmark = [
    pytest.mark.cuda_lane,
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]

GPU_TESTS = sorted((Path(__file__).parents[1] / "gpu").glob("*.py"))


@pytest.mark.parametrize("module", [path.stem for path in GPU_TESTS if path.stem != "__init__"])
def test_modules_of_the_gpu_lane_are_imported_where_triton_is(module: str) -> None:
    installed()
    importlib.import_module(f"tests.gpu.{module}")


class Event(MockEvent):
    """What `torch.cuda.Event` is to the engine."""

    def __init__(self, enable_timing: bool = False) -> None:
        super().__init__({}, Streams())  # nothing here lets the host wait for it

    def record(self, stream: MockStream) -> None:
        self.clock = stream.record_event().clock


class PacedCopy:
    """Stands for the kernel: notes what a launch of it touches, and when it would begin and end."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.spans: list[tuple[int, int]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(target: Tensor, source: Tensor, clock: Tensor, *numbers: Any, **meta: Any) -> None:
            self.streams.run("paced_copy", [source, clock], [target, clock])
            self.spans.append((numbers[7], numbers[9]))

        return launch


class Link:
    """An engine on mock streams, 1 GB/s fast and with 10 us of latency, between eight ranks."""

    def __init__(self, streams: Streams, kernel: PacedCopy) -> None:
        self.streams, self.kernel = streams, kernel
        self.engine = CudaEngine(Speed(gigabytes_per_s=1.0, latency_us=10.0), torch.device("cuda"))
        self.shard, self.whole = (torch.zeros(n, device="cuda") for n in (1024, 8192))
        kernel.spans.clear()

    def gather(self) -> Any:
        moves = [Move(self.whole, self.shard, writes=8)]
        return self.engine.launch("all_gather", self.whole.nbytes, 8, moves, [self.whole])


@pytest.fixture
def link() -> Iterator[Link]:
    """A link whose device does not exist."""
    installed()
    with dry_run(FakeTensorMode()) as run, ExitStack() as stack:
        kernel = PacedCopy(run.streams)
        for owner, name, value in (
            (cuda_engine, "Stream", run.streams.made),
            (cuda_engine, "Event", Event),
            (cuda_kernel, "paced_copy", kernel),
            (torch.cuda, "is_current_stream_capturing", bool),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        with mock.patch.object(MockStream, "synchronize"):  # allowed where the engine is made, and nowhere else
            link = Link(run.streams, kernel)
        yield link


def test_a_transfer_waits_for_its_caller_and_whoever_waits_for_it_may_read(link: Link) -> None:
    link.gather().wait()
    link.streams.run("read", [link.whole], [link.shard])
    assert link.streams.races == []


def test_whoever_does_not_wait_for_a_transfer_races_with_it(link: Link) -> None:
    work = link.gather()
    link.streams.run("read", [link.whole], [])
    (race,) = link.streams.races
    assert race.startswith("read on main reads what was not waited for: paced_copy")
    work.wait()


@pytest.mark.parametrize("is_dropped", [True, False])
def test_memory_of_a_transfer_that_nobody_waits_for_is_not_given_away(link: Link, is_dropped: bool) -> None:
    work = link.gather()
    if is_dropped:
        del work
    else:
        work._held = ()  # what its end would record is forgotten
    del link.whole, link.shard
    gc.collect()
    link.streams.run("other", [], [torch.empty(4, device="cuda")])
    assert bool(link.streams.races) is not is_dropped


def test_launches_of_a_transfer_share_its_time(link: Link) -> None:
    moves = [Move(whole, link.shard, writes=8) for whole in (link.whole, torch.zeros(8192, device="cuda"))]
    outputs = [move.output for move in moves]
    link.engine.launch("all_gather", 2 * link.whole.nbytes, 8, moves, outputs).wait()
    total = 10_000 + 2 * link.whole.nbytes * 7 // 8
    assert link.kernel.spans == [(10_000, (10_000 + total) // 2), ((10_000 + total) // 2, total)]


def test_what_the_kernel_cannot_copy_torch_moves_within_the_same_time(link: Link) -> None:
    turned = torch.zeros(32, 32, device="cuda").t()
    link.engine.launch("broadcast", turned.nbytes, 8, [Move(turned, link.shard)], [turned]).wait()
    link.streams.run("read", [turned], [])
    assert link.streams.races == []
    assert link.kernel.spans == [(0, 0), (10_000 + turned.nbytes * 7 // 8,) * 2]
