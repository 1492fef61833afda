"""Kernels that Inductor generates for CUDA give in Triton's interpreter what torch gives on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.cross_cuda.dry_run import running
from tests.cross_cuda.gpus import H100
from tests.cross_cuda.lane import installed
from tests.cross_cuda.numeric import interpreter
from tests.cross_cuda.numeric.computing import ComputingRun, ComputingStreams
from tests.cross_cuda.numeric.executor import first, run_all

pytestmark = [pytest.mark.cuda_lane, pytest.mark.timeout(900)]

Function = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def pointwise(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (
        F.gelu(x * w + 1),
        x.tanh().exp() + (x.abs() + 1e-3).rsqrt(),
        (x.erf() / w.cos()).sigmoid(),
        x.where(x > 0, w),
    )


def reductions(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x * w
    return y.sum(0), y.softmax(-1), y.amax(-1), y.argmax(-1), F.layer_norm(y, y.shape[1:], w, w), y.var(1)


def lookups(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    index = (x.abs() * 10).long().clamp(0, 31)[:, :8]
    return F.embedding(index, x), x[:32, :8].t().contiguous() @ x[:32, :16], F.cross_entropy(x, index[:, 0])


def halves(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = x.to(torch.bfloat16)
    return h * w.to(torch.bfloat16) + h, h.sum(-1), h.softmax(-1), F.silu(h), h.float().mean()


def eighths(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x.to(torch.float8_e4m3fn).float(), x.clamp(-3, 3).to(torch.float8_e5m2).to(torch.bfloat16)


def _computed(function: Function, *given: Tensor) -> list[Tensor]:
    """Run a function's code for CUDA."""
    lane, mode, run = (
        installed(),
        FakeTensorMode(allow_non_fake_inputs=True),
        ComputingRun(ComputingStreams(ranks=[0])),
    )
    torch._dynamo.reset()
    with lane.compiling(H100, machine_code=False), mode:
        fakes = [torch.empty(one.shape, device="cuda") for one in given]
        compiled = torch.compile(function, dynamic=False)
        compiled(*fakes)
    with running(run, mode), lane.watching(run):
        for fake, values in zip(fakes, given, strict=True):
            run.put(fake, [values])
        found = [run.get(result)[0] for result in compiled(*fakes)]
    run.begin()
    run_all(run.streams.items, first())
    return found


TOLERANCES: dict[Function, float] = {
    pointwise: 1e-6,
    reductions: 2e-6,
    lookups: 2e-6,
    halves: 2 * torch.finfo(torch.bfloat16).eps,
    eighths: 0.0,
}
"""Relative to the largest value. Inductor keeps float32 inside of a kernel where torch rounds in between."""


@pytest.mark.parametrize("shape", [(33, 100), pytest.param((64, 3000), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("function", TOLERANCES, ids=lambda function: function.__name__)
def test_computes_what_torch_computes(function: Function, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=generator) for size in (shape, shape[1:])]
    for found, wanted in zip(_computed(function, *given), function(*given), strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        error = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
        assert error <= TOLERANCES[function], error


def test_an_index_beyond_a_tensor_is_an_error() -> None:
    with pytest.raises(interpreter.OutOfBounds, match="a load"):
        _computed(lambda x, index: (x.take(index.long() + 2**40), x), torch.ones(8), torch.ones(8))
