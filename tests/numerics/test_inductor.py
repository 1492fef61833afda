"""The scenarios whose compiled code matters most, through Inductor; the others are checked on the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.numerics.harness import check_against_unsharded, check_bitwise, check_inductor
from tests.numerics.models import CheckpointedMLP, Scalars, rows_of_many_sizes
from tests.numerics.scenarios import REGRESSION, RESHARD, SCENARIOS, Lane, names
from tests.ranks import two_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@two_ranks(timeout=240)
def test_compiled_code_trains_a_model_with_norms() -> None:
    check_against_unsharded(REGRESSION, lower="inductor")


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_a_model_with_norms_as_fsdp2() -> None:
    check_inductor(REGRESSION)


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_a_tied_embedding_and_head() -> None:
    check_inductor(SCENARIOS["tied weights"])


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_with_activation_checkpointing() -> None:
    check_inductor(replace(REGRESSION, model=CheckpointedMLP, shard_kwargs=RESHARD))


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_in_mixed_precision() -> None:
    # Inductor keeps fp32 between fused bf16 operations, where eager rounds: a bf16 ulp is 2**-8.
    check_inductor(replace(REGRESSION, shard_kwargs={"mp_policy": BF16}), rtol=2**-6, atol=2**-8)


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_on_a_batch_size_that_changes_each_step() -> None:
    check_inductor(replace(REGRESSION, batch=rows_of_many_sizes))


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_from_one_line() -> None:
    check_inductor(SCENARIOS["one line"])


@pytest.mark.slow
@two_ranks(timeout=240)
@pytest.mark.parametrize("name", names(Lane.RANKS_COMPILED))
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


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_under_bf16_autocast() -> None:
    check_inductor(SCENARIOS["autocast"], rtol=2**-6, atol=2**-8)
