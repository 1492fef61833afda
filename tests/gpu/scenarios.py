"""Training on one device, held to unsharded training and to torch's fully_shard.

Every scenario is a plain function of a device. `tests/gpu` calls them with "cuda", on one rank of NCCL or on the
emulated link; `tests/gpu_dry` calls them with "cpu" and gloo, so that all but CUDA is tried everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard.ir import ops
from fxshard.ir.tags import COPY_OUT
from fxshard.testing import EmulatedLink, emulated_link
from tests.numerics.harness import (
    FSDP2,
    Scenario,
    System,
    Tools,
    check_against_unsharded,
    compare,
    fxshard_system,
    only_compile,
    only_shard,
    shard_blocks,
    start,
    train,
    train_step,
)
from tests.numerics.models import (
    GPT,
    MLP,
    ReadOnBothSides,
    ReadTwice,
    cross_entropy,
    rows,
    tokens,
    tokens_of_many_shapes,
)
from tests.numerics.test_accumulation import forwards_ahead, several, with_no_sync
from tests.numerics.test_graphs import Broken, squared_error_under_autocast, two_forwards_before_two_backwards
from tests.numerics.test_loop import clip_and_update, evaluate, foreach_adamw, fused_adamw, scaled, update_and_zero
from tests.numerics.test_parameters import (
    CalledTwice,
    LoRA,
    SelfAttention,
    Uneven,
    freeze_then_thaw,
    halve_gradients,
    mlp_with_a_frozen_block,
)
from tests.numerics.test_units import compile_each_block, shard_nested

WORLD_SIZE: Final = 8
"""Ranks of the emulated link."""

BF16: Final = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PRECISIONS: Final = ("fp32", "bf16")
TOLERANCES: Final[Mapping[str, dict[str, float]]] = {
    "fp32": {"rtol": 1e-5, "atol": 1e-6},
    # Inductor keeps fp32 between fused bf16 operations, where eager rounds: a bf16 ulp is 2**-8.
    "bf16": {"rtol": 2**-6, "atol": 2**-8},
}

WIDE: Final = 32  # heads of 16, as kernels for attention want them
REGRESSION: Final = Scenario(model=MLP, batch=rows())
LANGUAGE: Final = Scenario(model=partial(GPT, width=WIDE), batch=tokens(), loss=cross_entropy)
TIED: Final = replace(LANGUAGE, model=partial(GPT, width=WIDE, tied=True))
CHECKPOINTED: Final = replace(LANGUAGE, model=partial(GPT, width=WIDE, checkpointing=True))
RESHARD: Final = {"reshard_after_forward": True}


def reduce_in_a_group_of_its_own(model: nn.Module, tools: Tools) -> nn.Module:
    """Shard block by block; ours reduces in a process group beside the one that gathers."""
    shard_blocks(model, tools)
    if tools.system.ours:
        cast(Any, model).set_separate_reduce_scatter_group(True)
    return tools.compile(model)


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "plain training": REGRESSION,
    "a language model": LANGUAGE,
    "resharded after forward": replace(LANGUAGE, shard_kwargs=RESHARD),
    "kept after forward": replace(LANGUAGE, shard_kwargs={"reshard_after_forward": False}),
    "activation checkpointing": replace(CHECKPOINTED, shard_kwargs=RESHARD),
    "accumulation": replace(REGRESSION, backward=several),
    "accumulation of a tied weight": replace(TIED, backward=several),
    "no_sync": replace(REGRESSION, backward=with_no_sync),
    "forwards ahead of backwards": replace(REGRESSION, backward=forwards_ahead),
    "frozen parameters": replace(REGRESSION, model=mlp_with_a_frozen_block),
    "requires_grad changed": replace(REGRESSION, before_step=freeze_then_thaw),
    "tied weights": TIED,
    "clipped gradients": replace(REGRESSION, update=partial(clip_and_update, foreach=None)),
    "gradients zeroed in place": replace(REGRESSION, update=update_and_zero),
    "hooks on gradients": replace(REGRESSION, before_step=halve_gradients),
    "evaluation between": replace(REGRESSION, before_step=evaluate),
    "GradScaler": scaled(REGRESSION),
    "autocast": replace(REGRESSION, loss=squared_error_under_autocast),
    "fused AdamW": replace(REGRESSION, optimizer=fused_adamw),
    "foreach AdamW": replace(REGRESSION, optimizer=foreach_adamw),
    "a graph break": replace(REGRESSION, model=Broken),
    "a unit of two graphs": replace(REGRESSION, model=ReadOnBothSides),
    "each block compiled alone": replace(LANGUAGE, prepare=compile_each_block),
    "nothing compiled": replace(LANGUAGE, prepare=only_shard),
    "units inside units": replace(LANGUAGE, prepare=shard_nested),
    "one line": replace(REGRESSION, prepare=only_compile),
    "shapes that change": replace(LANGUAGE, batch=tokens_of_many_shapes),
    "a group for reductions": replace(REGRESSION, prepare=reduce_in_a_group_of_its_own),
    "two forwards, two backwards": replace(REGRESSION, backward=two_forwards_before_two_backwards),
    "LoRA": replace(REGRESSION, model=LoRA),
    "uneven parameters": Scenario(model=Uneven, batch=rows(15, 15)),
    "a parameter read twice": replace(REGRESSION, model=ReadTwice),
    "a module called twice": replace(REGRESSION, model=CalledTwice),
    "MultiheadAttention": replace(LANGUAGE, model=SelfAttention),
}
"""What is trained on one rank, lowered to the interpreter."""

COMPILED: Final[Mapping[str, tuple[str, ...]]] = {
    "fp32": (
        "plain training",
        "a language model",
        "activation checkpointing",
        "accumulation",
        "one line",
        "each block compiled alone",
        "shapes that change",
    ),
    "bf16": ("a language model", "accumulation"),
}
"""By precision, those whose compiled code matters most: also through Inductor."""

ON_LINK: Final = (
    "plain training",
    "resharded after forward",
    "kept after forward",
    "activation checkpointing",
    "accumulation",
    "tied weights",
    "frozen parameters",
    "clipped gradients",
    "a graph break",
    "each block compiled alone",
    "a group for reductions",
)
"""Also on the emulated link, where units are gathered and reduced."""

COMPILED_ON_LINK: Final[Mapping[str, tuple[str, ...]]] = {
    "fp32": ("plain training", "activation checkpointing", "accumulation", "tied weights"),
    "bf16": ("activation checkpointing", "accumulation"),
}
"""By precision, those that run there through Inductor."""

OWN_PRECISION: Final = ("autocast",)
"""Scenarios that compute in bf16 by themselves."""

NOT_IN_FSDP2: Final = ("hooks on gradients",)
"""What torch's fully_shard does otherwise: it runs no such hooks."""


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """A process group of one rank: NCCL on CUDA, gloo on the CPU."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()


@contextmanager
def on_link(device: str, **speed: Any) -> Iterator[EmulatedLink]:
    """A link of emulated ranks, instant unless `speed` says otherwise, which nothing compiled outlives."""
    with emulated_link(WORLD_SIZE, device=device, **speed) as link:
        try:
            yield link
        finally:
            torch._dynamo.reset()


def require_cuda() -> None:
    """Skip the test where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


GROUPS: Final[Mapping[str, Callable[[str], Any]]] = {"one rank": one_rank, "emulated link": on_link}


def in_precision(scenario: Scenario, precision: str, system: System) -> tuple[Scenario, System]:
    """Return the scenario and our system with that precision."""
    if precision == "fp32":
        return scenario, system
    # Where the compiler shards, it has to be told; FSDP2 takes the policy in any case.
    given = {"param_dtype": BF16.param_dtype, "reduce_dtype": BF16.reduce_dtype}
    options = {**system.options, **given} if scenario.prepare is only_compile else system.options
    shard_kwargs = {**scenario.shard_kwargs, "mp_policy": BF16}
    return replace(scenario, shard_kwargs=shard_kwargs), replace(system, options=options)


def check_against_fsdp2(name: str, device: str, precision: str, *, lower: str = "eager", **options: Any) -> None:
    """Hold losses and first gradients to those of torch's fully_shard on the same group.

    Args:
        name: key of `SCENARIOS`.
        device: "cuda" or "cpu".
        precision: one of `PRECISIONS`.
        lower: "eager" or "inductor".
        **options: of our backend.
    """
    ours = fxshard_system(lower=lower, device=device, **options)
    scenario, ours = in_precision(SCENARIOS[name], precision, ours)
    theirs = replace(FSDP2, device=device)
    tolerances = TOLERANCES["bf16" if name in OWN_PRECISION else precision]
    compare(train(scenario, ours), train(scenario, theirs), params=False, **tolerances)


def check_in_float64(name: str, device: str, *, lower: str = "eager") -> None:
    """Hold everything to unsharded training, on one rank."""
    system = fxshard_system(dtype=torch.float64, lower=lower, device=device)
    check_against_unsharded(SCENARIOS[name], system=system)


def accumulating_graph(device: str, precision: str) -> str:
    """Train with accumulation through Inductor, and return the text of the backward that adds up."""
    scenario, system = in_precision(
        SCENARIOS["accumulation"], precision, fxshard_system(lower="inductor", device=device)
    )
    run = start(scenario, system)
    train_step(run, 0)
    (text,) = [graph.text for graph in fxshard.compiled_graphs(run.model) if graph.kind == "backward_accumulate"]
    return text


# ---- collectives


def check_collectives(device: str) -> None:
    """The collectives that graphs launch, on the backend itself: fxshard launches none where there is one rank."""
    world: Any = dist.group.WORLD
    c10d, name = torch.ops._c10d_functional, world.group_name
    sent = [torch.randn(numel, device=device) for numel in (1000, 3)]
    for launched in (
        c10d.all_gather_into_tensor_coalesced(sent, 1, name),
        c10d.reduce_scatter_tensor_coalesced(sent, "sum", 1, name),
        [c10d.all_gather_into_tensor(x, 1, name) for x in sent],
        [c10d.reduce_scatter_tensor(x, "sum", 1, name) for x in sent],
    ):
        for arrived, x in zip(launched, sent, strict=True):
            assert torch.equal(c10d.wait_tensor(arrived), x)
    gathered = c10d.all_gather_into_tensor(sent[0], 1, name)
    copy = ops.COPY_OUT(gathered, [10, 10], [10, 1], 5, COPY_OUT)
    assert torch.equal(c10d.wait_tensor(copy), sent[0][5:105].view(10, 10))
