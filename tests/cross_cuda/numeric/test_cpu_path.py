"""fxshard on the CPU gives what its code for CUDA is compared with: unsharded training in eager mode."""

from __future__ import annotations

import pytest
import torch

from tests.cross_cuda import layouts
from tests.cross_cuda.numeric.cases import CORE, MORE, on_the_cpu
from tests.cross_cuda.numeric.computed import compiled
from tests.cross_cuda.numeric.executor import first
from tests.cross_cuda.training import Case

pytestmark = [pytest.mark.cuda_lane, pytest.mark.timeout(900)]

CASES = [
    *(pytest.param(case, id=name) for name, case in CORE.items()),
    *(
        pytest.param(case, id=name, marks=pytest.mark.slow)
        for name, case in MORE.items()
        # Where steps overlap the host reads values on the CPU, and fake tensors have none. Under tensor parallelism a
        # matrix product is a sum over ranks, each part of it rounded to bf16.
        if not case.overlaps_step and case.layout is not layouts.tensor_parallel
    ),
]
TWO_ROUNDINGS = 2 * torch.finfo(torch.float32).eps
"""Of a sum over two mesh axes, which is another one than that over all ranks."""


@pytest.mark.parametrize("case", CASES)
def test_fxshard_on_the_cpu_is_as_far_from_float64_as_unsharded_training(case: Case) -> None:
    with compiled(on_the_cpu(case)) as computed:
        errors = computed.errors(computed.record().computed(first()))
    assert len(errors) > 40
    for name, (ours, cpu) in errors.items():
        assert ours <= 1.05 * cpu + TWO_ROUNDINGS, (name, ours, cpu)
