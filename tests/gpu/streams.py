"""Order and overlap of a step on the emulated link, and optimizers with a stream of their own.

Plain functions of a device, as in `checks.py`. `trace.py` reads what the profiler recorded.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fxshard
from fxshard.sharding.sharded_module import ShardedModule
from tests.gpu.checks import BF16
from tests.gpu.trace import (
    Event,
    Span,
    Work,
    hidden_share,
    issued,
    kernels,
    on_their_stream,
    products,
    transfers,
    units_beside,
)
from tests.models import FeedForward
from tests.numerics.harness import NUM_STEPS, Run, compare, fxshard_system, train, world_mesh
from tests.numerics.scenarios import REGRESSION

SLEEP_CYCLES: Final = 100_000_000  # 0.05 s: far longer than the host takes to launch the gather


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model of blocks of which no two are equal, and the link that suits it."""

    width: int = 8  # of what goes from block to block
    first: int = 10  # hidden size of the first block
    step: int = 4  # by which the hidden sizes differ; the first one is `first`
    num_blocks: int = 4  # how many there are
    rows: int = 7  # of a batch
    gigabytes_per_s: float = 1.0  # of the link
    latency_us: float = 0.0  # of the link

    @classmethod
    def of(cls, device: str) -> Shape:
        """On a GPU a block computes longer than it travels, and travels longer than the host takes to launch the next.

        3.3 TFLOP forward (5 ms); 44 MB of bf16 (2 ms), 88 MB reduced (4 ms). With a profiler and a dispatch mode the
        host takes 0.3 ms and more between a launch and the product behind it.
        """
        if device == "cpu":
            return cls()
        return cls(width=2048, first=6144, step=256, rows=65536, gigabytes_per_s=25.0, latency_us=10.0)

    @property
    def unit_of_size(self) -> dict[int, str]:
        """Hidden size -> the unit that has it."""
        return {self.first + i * self.step: f"blocks.{i}" for i in range(self.num_blocks)}

    def unit_of(self, op: Span) -> str:
        """The unit of a product: no other size of the model is a hidden size."""
        sizes = self.unit_of_size
        units = {sizes[size] for shape in op.shapes for size in shape if size in sizes}
        return units.pop() if len(units) == 1 else ""


class Chain(nn.Module):
    """The blocks, one after the other."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(shape.width, hidden) for hidden in shape.unit_of_size)
        self.scale = nn.Parameter(torch.ones(shape.width))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def profiled_step(device: str, shape: Shape, **options: Any) -> list[Event]:
    """Train on the link that is there, and return the trace of a step after those that compile.

    Args:
        device: "cuda" or "cpu".
        shape: of the model.
        **options: of the backend; launches are FSDP2's unless they say otherwise.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device(device):
        model = Chain(shape)
    for module in (*model.blocks, model):
        fxshard.fully_shard(cast(nn.Module, module), mesh=world_mesh(device), mp_policy=BF16)
    compiled: Any = torch.compile(model, backend="fxshard", options={"schedule": "fsdp2", **options})
    x = torch.randn(shape.rows, shape.width, device=device)

    def step() -> None:
        compiled(x).float().square().mean().backward()
        model.zero_grad()

    for _ in range(3):
        step()
    profiled(device, step)  # the first profile of a process also sets the profiler up
    return profiled(device, step)


def profiled(device: str, step: Callable[[], object]) -> list[Event]:
    """Run a step under the profiler and return its trace's events."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    _synchronize(device)
    with profile(activities=activities, record_shapes=True) as profiler:
        step()
        _synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def check_order(events: Sequence[Event], shape: Shape) -> None:
    """Each unit but the first one is launched before the compute of the one before it, in forward and in backward."""
    order = issued(events, shape.unit_of)
    blocks = list(shape.unit_of_size.values())
    turn = len(order) - order[::-1].index(("unshard", blocks[0]))  # block 0 is gathered again last of all
    forward_end = order.index(("compute", blocks[-1])) + 1
    forward, backward = order[:forward_end], order[forward_end:]
    assert turn > forward_end, order
    for launches, names in ((forward, blocks), (backward, blocks[::-1])):
        for before, unit in itertools.pairwise(names):
            assert launches.index(("unshard", unit)) < launches.index(("compute", before)), (unit, launches)


def overlap_problems(events: Sequence[Event], shape: Shape, *, least: float = 0.5) -> list[str]:
    """Say which transfers of blocks ran without kernels beside them that could have hidden them.

    In forward the gather of block i + 1 runs beside the products of block i. In backward that of block i - 1 is
    launched once block i + 1 has read its parameters for the last time, and runs beside its last products or those of
    block i; and the reduction of block i beside its last product or those of block i - 1. The first gather of each has
    nothing to hide behind, nor has the last reduction.

    Args:
        events: of a trace with kernels.
        shape: of the model.
        least: share of a transfer's time during which a kernel has to run on the stream of the products.
    """
    found = kernels(events)
    compute = products(found, shape.unit_of)
    moved, busy = transfers(found, compute), on_their_stream(found, compute)
    problems = []
    for work, beside in expected_beside(moved, list(shape.unit_of_size.values())):
        share, units = hidden_share(work, busy), units_beside(work, compute)
        if share < least or units.isdisjoint(beside):
            wanted = " or ".join(beside)
            problems.append(f"{work.verb} {work.unit}: {share:.0%} hidden, beside {sorted(units)}, not {wanted}")
    return problems


def expected_beside(moved: Sequence[Work], blocks: Sequence[str]) -> Iterator[tuple[Work, Sequence[str]]]:
    """Yield the transfers that compute should hide, each with the units of which one's products should do it."""
    for i, unit in enumerate(blocks):
        gathers = [work for work in moved if work.unit == unit and work.verb == "unshard"]
        reductions = [work for work in moved if work.unit == unit and work.verb == "reduce"]
        assert (len(gathers), len(reductions)) == (2, 1), (unit, [(work.verb, work.unit) for work in moved])
        if i > 0:
            yield gathers[0], blocks[i - 1 : i]
            yield reductions[0], blocks[i - 1 : i + 1]
        if i < len(blocks) - 1:
            yield gathers[1], blocks[i + 1 : i + 3]


# ---- an optimizer on a stream of its own


class OwnStream:
    """Updates on a stream of its own, late, and has the next forward wait for that by the event alone."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._read: list[Tensor | None] = []  # kept until the main stream has waited

    def update(self, run: Run) -> None:
        with self._behind_the_main_stream():
            if self._stream is not None:
                torch.cuda._sleep(SLEEP_CYCLES)
            run.optim.step()
            event = torch.cuda.Event() if self._stream is not None else torch.Event()
            if self._stream is not None:
                event.record()
        self._read = [p.grad for p in run.model.parameters()]
        run.optim.zero_grad()
        cast(ShardedModule, run.model).set_post_optim_event(event)
        if self._stream is not None and len(run.losses) == NUM_STEPS:  # no forward comes: parameters are read
            torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def _behind_the_main_stream(self) -> Iterator[None]:
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        context: AbstractContextManager[object] = nullcontext() if stream is None else torch.cuda.stream(stream)
        with context:
            yield


def train_with_own_stream(device: str, stepping: OwnStream, **options: Any) -> None:
    """Hold training on the link that is there, with such an update, to plain training."""
    options = {"lower": "inductor" if device == "cuda" else "eager", **options}
    scenario = replace(REGRESSION, update=stepping.update)
    ours = train(scenario, fxshard_system(device=device, **options))
    expected = train(REGRESSION, fxshard_system(device=device, **options))
    compare(ours, expected, rtol=1e-6, atol=1e-7)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
