"""The scenarios whose compiled code matters most, through Inductor; the others are checked on the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.numerics.harness import check_against_unsharded, check_bitwise, check_inductor
from tests.numerics.models import Scalars
from tests.numerics.scenarios import BF16, REGRESSION, SCENARIOS, Lane, names
from tests.ranks import two_ranks


@two_ranks(timeout=240)
def test_compiled_code_trains_a_model_with_norms() -> None:
    check_against_unsharded(REGRESSION, lower="inductor")


@pytest.mark.slow
@two_ranks(timeout=240)
@pytest.mark.parametrize("by_autocast", [True, False])
def test_compiled_code_trains_in_mixed_precision(by_autocast: bool) -> None:
    # Inductor keeps fp32 between fused bf16 operations, where eager rounds: a bf16 ulp is 2**-8.
    scenario = SCENARIOS["autocast"] if by_autocast else replace(REGRESSION, shard_kwargs={"mp_policy": BF16})
    check_inductor(scenario, rtol=2**-6, atol=2**-8)


@pytest.mark.slow
@two_ranks(timeout=240)
@pytest.mark.parametrize("name", ["plain training", "tied weights", "one line", *names(Lane.RANKS_COMPILED)])
def test_compiled_code_trains_with(name: str) -> None:
    check_inductor(SCENARIOS[name])


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("name", names(Lane.RANKS))
def test_interpreted_code_computes_the_bits_of_fsdp2_in_float32_with(name: str) -> None:
    check_bitwise(SCENARIOS[name])


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_scalar_parameters() -> None:
    check_against_unsharded(replace(REGRESSION, model=Scalars), lower="inductor")
