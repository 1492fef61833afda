"""Training on one device, held to unsharded training and to torch's fully_shard.

Here and in the modules beside, what is tried is a plain function of a device. `tests/gpu` calls it with "cuda", on one
rank of NCCL or on the emulated link; `tests/gpu_dry` with "cpu" and gloo, so that all but CUDA is tried everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard.ir import ops
from fxshard.ir.tags import COPY_OUT
from fxshard.testing import EmulatedLink, emulated_link
from tests.numerics.harness import (
    FSDP2,
    Scenario,
    System,
    check_against_unsharded,
    compare,
    fxshard_system,
    only_compile,
    start,
    train,
    train_step,
)
from tests.numerics.scenarios import OWN_PRECISION, SCENARIOS, Lane, names

WORLD_SIZE: Final = 8
"""Ranks of the emulated link."""

BF16: Final = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PRECISIONS: Final = ("fp32", "bf16")
TOLERANCES: Final[Mapping[str, dict[str, float]]] = {
    "fp32": {"rtol": 1e-5, "atol": 1e-6},
    # Inductor keeps fp32 between fused bf16 operations, where eager rounds: a bf16 ulp is 2**-8.
    "bf16": {"rtol": 2**-6, "atol": 2**-8},
}

COMPILED: Final = {"fp32": Lane.ONE_RANK_COMPILED, "bf16": Lane.ONE_RANK_COMPILED_BF16}
COMPILED_ON_LINK: Final = {"fp32": Lane.LINK_COMPILED, "bf16": Lane.LINK_COMPILED_BF16}


def in_each_precision(lanes: Mapping[str, Lane]) -> list[tuple[str, str]]:
    """(precision, scenario) of the lane of each precision."""
    return [(precision, name) for precision, lane in lanes.items() for name in names(lane)]


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
