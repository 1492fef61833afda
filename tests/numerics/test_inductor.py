"""The scenarios whose compiled code matters most, through Inductor; the others are checked on the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.numerics.harness import (
    Scenario,
    check_against_unsharded,
    check_bitwise,
    check_inductor,
    only_compile,
)
from tests.numerics.models import (
    GPT,
    MLP,
    CheckpointedMLP,
    ReadTwice,
    checkpointed_gpt,
    cross_entropy,
    rows,
    rows_of_many_sizes,
    tied_gpt,
    tokens,
    tokens_of_many_shapes,
)
from tests.numerics.test_graphs import (
    Broken,
    one_backward_through_two_forwards,
    squared_error_under_autocast,
    two_forwards_before_two_backwards,
)
from tests.numerics.test_parameters import (
    BatchNorm,
    CalledTwice,
    LoRA,
    Scalars,
    SelfAttention,
    Tables,
    TinyUnits,
    Uneven,
    Unused,
    freeze_then_thaw,
)
from tests.numerics.test_units import compile_each_block, shard_blocks_as_one_unit, shard_nested
from tests.ranks import two_ranks

LANGUAGE = Scenario(model=GPT, batch=tokens(), loss=cross_entropy)
REGRESSION = Scenario(model=MLP, batch=rows())
RESHARD = {"reshard_after_forward": True}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@two_ranks(timeout=240)
def test_compiled_code_trains_a_model_with_norms() -> None:
    check_inductor(REGRESSION)
    check_against_unsharded(REGRESSION, lower="inductor")


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_a_tied_embedding_and_head() -> None:
    check_inductor(replace(LANGUAGE, model=tied_gpt))


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
    check_inductor(replace(REGRESSION, prepare=only_compile))


OTHERS = {
    "uneven and tiny parameters": Scenario(model=Uneven, batch=rows(15, 15)),
    "fewer rows than ranks": replace(REGRESSION, model=TinyUnits),
    "a LoRA layer": replace(REGRESSION, model=LoRA),
    "requires_grad changed": replace(REGRESSION, before_step=freeze_then_thaw),
    "tables": replace(REGRESSION, model=Tables),
    "BatchNorm": replace(REGRESSION, model=BatchNorm),
    "a parameter read twice": replace(REGRESSION, model=ReadTwice),
    "a module called twice": replace(REGRESSION, model=CalledTwice),
    "unused parameters": replace(REGRESSION, model=Unused),
    "MultiheadAttention": replace(LANGUAGE, model=SelfAttention),
    "a graph break": replace(REGRESSION, model=Broken),
    "activation checkpointing": replace(LANGUAGE, model=checkpointed_gpt, shard_kwargs=RESHARD),
    "a batch and length that change": replace(LANGUAGE, batch=tokens_of_many_shapes),
    "reshard after forward": replace(LANGUAGE, shard_kwargs=RESHARD),
    "two forwards, two backwards": replace(REGRESSION, backward=two_forwards_before_two_backwards),
    "two forwards, one backward": replace(REGRESSION, backward=one_backward_through_two_forwards),
    "each block compiled alone": replace(LANGUAGE, prepare=compile_each_block),
    "a list as one unit": replace(REGRESSION, prepare=shard_blocks_as_one_unit),
    "units inside units": replace(LANGUAGE, prepare=shard_nested),
    "dynamic": replace(LANGUAGE, batch=tokens_of_many_shapes, compile_kwargs={"dynamic": True, "fullgraph": True}),
    "not dynamic": replace(LANGUAGE, batch=tokens_of_many_shapes, compile_kwargs={"dynamic": False}),
}


@pytest.mark.slow
@two_ranks(timeout=240)
@pytest.mark.parametrize("name", OTHERS)
def test_compiled_code_trains_with(name: str) -> None:
    check_inductor(OTHERS[name])


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "two forwards, one backward"])
def test_interpreted_code_computes_the_bits_of_fsdp2_in_float32_with(name: str) -> None:
    check_bitwise(OTHERS[name])


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_scalar_parameters() -> None:
    check_against_unsharded(replace(REGRESSION, model=Scalars), lower="inductor")


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_under_bf16_autocast() -> None:
    check_inductor(replace(REGRESSION, loss=squared_error_under_autocast), rtol=2**-6, atol=2**-8)
