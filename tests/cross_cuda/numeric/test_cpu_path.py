"""fxshard on the CPU gives what its code for CUDA is compared with: unsharded training in eager mode."""

from __future__ import annotations

import pytest

from tests.cross_cuda.numeric.cases import CORE, MORE, on_the_cpu
from tests.cross_cuda.numeric.computed import compiled
from tests.cross_cuda.numeric.executor import first
from tests.cross_cuda.training import Case

pytestmark = [pytest.mark.cuda_lane, pytest.mark.timeout(900)]

CASES = [
    *(pytest.param(case, id=name) for name, case in CORE.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in MORE.items()),
]


@pytest.mark.parametrize("case", CASES)
def test_fxshard_on_the_cpu_is_as_far_from_float64_as_unsharded_training(case: Case) -> None:
    with compiled(on_the_cpu(case)) as computed:
        errors = computed.errors(computed.record().computed(first()))
    ratios = {name: ours / cpu if cpu else float(ours == 0) for name, (ours, cpu) in errors.items()}
    print("errors relative to those of unsharded training:", min(ratios.values()), max(ratios.values()))
    assert len(ratios) > 40
    assert max(ratios.values()) <= 1.05, ratios
