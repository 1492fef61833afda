"""What a graph takes, measured, beside what its explanation says.

[Note: what is compared]
An explanation counts a graph's inputs and all that the graph allocates (`fxshard/cost/stats.py`). What is measured is
by how much the memory in use grows over that at the graph's beginning, where of all that is counted only the inputs
are there. So `inputs + growth` is held to the explanation's peak. Bytes are those that were asked for: what the
allocator rounds up is not counted. Interpreted graphs allocate what the explanation counts; Inductor fuses some of it
away, so there it is a bound.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

import fxshard
from tests.nodes import live_bytes
from tests.numerics.harness import blocks_of, world_mesh
from tests.numerics.models import MLP
from tests.watching import LiveBytes, watched


class CudaMeter(AbstractContextManager["CudaMeter"]):
    """Measures by how many bytes the memory in use grows at most, while it is entered.

    It asks torch's allocator, which counts when the host allocates and frees, not when kernels run.
    """

    def __init__(self) -> None:
        self.growth = 0  # of the last time
        self._before = 0

    def __enter__(self) -> CudaMeter:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        return self

    def __exit__(self, *_: object) -> None:
        self.growth = torch.cuda.memory_stats()["requested_bytes.all.peak"] - self._before


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes of one graph, inputs and all; see [Note: what is compared]."""

    measured: int
    expected: int


def graph_peaks(device: str, *, width: int, rows: int, num_blocks: int = 4, **options: Any) -> dict[str, Peak]:
    """Train on the link that is there, and measure one forward and one backward.

    Args:
        device: "cuda" or "cpu", where only interpreted graphs can be measured.
        width: of the model.
        rows: of the batch.
        num_blocks: of the model.
        **options: of the backend.

    Returns:
        By stage, "forward" and "backward".
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    meter: CudaMeter | LiveBytes = CudaMeter() if device == "cuda" else LiveBytes()
    with torch.device(device):
        model = MLP(num_blocks, width)
    for module in (*blocks_of(model), model):
        fxshard.fully_shard(module, mesh=world_mesh(device))
    compiled: Any = torch.compile(model, backend=watched(lambda: meter, **options))
    x, gradient = (torch.ones(rows, width, device=device) for _ in range(2))
    for _ in range(2):
        compiled(x).backward(gradient)
        model.zero_grad()
    output = compiled(x)
    growth = {"forward": meter.growth}
    with meter:
        output.backward(gradient)
    growth["backward"] = meter.growth
    return {
        stage: Peak(measured=_inputs(model, stage) + grown, expected=_expected(model, stage))
        for stage, grown in growth.items()
    }


def _expected(model: torch.nn.Module, stage: str) -> int:
    (frame,) = fxshard.explanation_of(model).frames
    return int(frame.stats_of(frame.running(stage)).evaluate().peak_bytes)


def _inputs(model: torch.nn.Module, stage: str) -> int:
    (frame,) = fxshard.explanation_of(model).frames
    series = live_bytes(frame.running(stage).graph, donated=stage == "backward")
    return next(iter(series.values()))
