"""Buckets, coalesced launches and dtypes on real ranks: the same numbers as FSDP2 and as unsharded training."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard.hardware import BUILTIN
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.pipeline import Pipeline
from tests.models import Doing
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    Tools,
    compare,
    compile_module,
    fxshard_system,
    train,
    world_mesh,
)
from tests.numerics.models import WIDTH
from tests.numerics.scenarios import REGRESSION
from tests.pairwise import slow
from tests.ranks import two_ranks

same_bits = functools.partial(compare, rtol=0, atol=0)
# Inductor fuses and reorders float32 sums; that is all in which compiled code may differ from FSDP2.
same_but_for_fusion = functools.partial(compare, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("size", ["auto", 0.0005, 1])
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_trains_in_buckets_of_any_size(size: str | float, lower: str) -> None:
    same = same_bits if lower == "eager" else same_but_for_fusion
    same(train(REGRESSION, fxshard_system(bucket=size, lower=lower)), train(REGRESSION, FSDP2))


def cut_everything(pipeline: Pipeline) -> Pipeline:
    """Reductions are cut in the interpreter as well."""
    steps = (CoalesceCollectives() if isinstance(step, CoalesceCollectives) else step for step in pipeline.split)
    return replace(pipeline, split=tuple(steps))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("lower", ["eager", slow("inductor")])
@pytest.mark.parametrize("size", ["unit", "auto"])
def test_trains_where_nothing_is_copied(size: str, lower: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "hardware.json")
        spec = replace(BUILTIN["cpu"], gather_tensor_overhead=1e-9, reduce_tensor_overhead=1e-9)
        with open(path, "w") as file:
            file.write(spec.to_json())
        system = fxshard_system(bucket=size, hardware=path, passes=cut_everything, lower=lower)
        ours = train(REGRESSION, system)
        graphs = [graph for graph in fxshard.compiled_graphs(ours.model) if "coalesced" in str(graph)]
        same = same_bits if lower == "eager" else same_but_for_fusion
        same(ours, train(REGRESSION, FSDP2))
    assert graphs


class TwoDtypes(nn.Module):
    """Parameters of two dtypes, in this order."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(6, 4).to(first))
        self.b = nn.Parameter(torch.randn(8, 4).to(second))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a.double().t() @ self.a.double() @ self.b.double().t()


@two_ranks
@pytest.mark.parametrize("lower", ["eager", slow("inductor"), slow("uncompiled")])
@pytest.mark.parametrize(
    ("first", "second"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64)],
)
def test_gathers_a_unit_of_two_dtypes(first: torch.dtype, second: torch.dtype, lower: str) -> None:
    plain, sharded = TwoDtypes(first, second), TwoDtypes(first, second)
    fxshard.fully_shard(sharded, mesh=world_mesh())
    model = sharded if lower == "uncompiled" else compile_module(sharded, {"lower": lower})
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))  # the same on every rank
    expected, found = plain(x), model(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)  # sums in float64, reordered by Inductor
    expected.sum().backward()
    found.sum().backward()
    for name, parameter in sharded.named_parameters():
        grad = parameter.grad
        assert grad is not None
        torch.testing.assert_close(grad.full_tensor(), plain.get_parameter(name).grad)  # type: ignore[attr-defined]


def large_and_small() -> nn.Module:
    """Parameters of more and less than a MiB, some with rows that two ranks cannot share evenly."""
    parts = {
        "before": nn.Linear(WIDTH, 3),
        "wide": nn.Linear(3, 87_383),
        "narrow": nn.Linear(87_383, 3),
        "after": nn.Linear(3, WIDTH),
    }
    return Doing(lambda m, x: m.after(m.narrow(torch.tanh(m.wide(m.before(x))))), **parts)


@two_ranks
@pytest.mark.parametrize("policy", [{}, slow({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})])
def test_trains_outside_of_graphs_where_large_parameters_are_sent_by_themselves(policy: dict[str, Any]) -> None:
    def only_shard(model: nn.Module, tools: Tools) -> nn.Module:
        tools.shard(model, mp_policy=MixedPrecisionPolicy(**policy))
        return model

    scenario = replace(REGRESSION, model=large_and_small, prepare=only_shard)
    same_bits(train(scenario, fxshard_system()), train(scenario, FSDP2))


def side_by_side() -> nn.Module:
    """Adds two layers of one input, so that one node of a graph is the gradient of both."""
    a, b, head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return Doing(lambda m, x: m.head(torch.tanh(m.a(x) + m.b(x))), a=a, b=b, head=head)


def shard_each_child(model: nn.Module, tools: Tools) -> nn.Module:
    for child in model.children():
        tools.shard(child)
    tools.shard(model)
    return tools.compile(model)


@two_ranks
@pytest.mark.parametrize("size", ["auto", 1])
def test_trains_units_that_share_a_gradient(size: str | float) -> None:
    scenario = replace(REGRESSION, model=side_by_side, prepare=shard_each_child)
    ours = train(scenario, fxshard_system(bucket=size, lower="inductor"))
    same_but_for_fusion(ours, train(scenario, FSDP2))


class LearnedToken(nn.Module):
    """Puts a learned column before a sequence whose length changes: its gradient has a symbolic stride."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(8, 1))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.token, self.linear(x).t()], 1)
        return y * y.sum(0, keepdim=True)


@two_ranks
@pytest.mark.parametrize("dynamic", [None, True])
def test_reduces_a_gradient_whose_strides_are_symbolic(dynamic: bool | None) -> None:
    model = LearnedToken()
    reference = copy.deepcopy(model)
    fxshard.fully_shard(model, mesh=world_mesh())
    compiled = compile_module(model, EAGER, dynamic=dynamic)
    for length in (4, 6, 9):
        x = torch.randn(length, 8, generator=torch.Generator().manual_seed(length))
        for module in (compiled, reference):
            module(x).sum().backward()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None
        torch.testing.assert_close(grad.full_tensor(), reference.get_parameter(name).grad)  # type: ignore[attr-defined]
