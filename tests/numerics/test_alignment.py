"""Unsharded parameters begin at multiples of 16 bytes, also where they are views of what one rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from tests.numerics.harness import compile_module, full, world_mesh
from tests.pairwise import slow
from tests.ranks import two_ranks


class Rope(nn.Module):
    """Complex factors behind a parameter of odd size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(1))
        self.factors = nn.Parameter(torch.randn(4, 2))
        self.shift = nn.Parameter(torch.randn(3))
        self.more = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.view_as_complex(self.factors) * torch.view_as_complex(self.more)
        return torch.view_as_real(torch.view_as_complex(x) * both) * self.scale + self.shift.sum()


class Pointers(nn.Module):
    """Says where its parameters lie."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(n) for n in (1, 3, 2, 4, 5, 8))
        self.found: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found = [part.data_ptr() % 16 for part in self.parts]
        return x * torch.cat([*self.parts]).sum()


def replicated() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


FORMS = pytest.mark.parametrize("lower", ["eager", slow("inductor"), "uncompiled"])


def made(model: nn.Module, lower: str, **kwargs: Any) -> nn.Module:
    fxshard.fully_shard(model, **kwargs)
    return model if lower == "uncompiled" else compile_module(model, {"lower": lower})


@two_ranks
@FORMS
@pytest.mark.parametrize("mesh", [replicated, world_mesh])
def test_complex_views_train_as_unsharded(lower: str, mesh: Any) -> None:
    model, plain, x = Rope(), Rope(), torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(1))
    run = made(model, lower, mesh=mesh())
    for each in (run, plain):
        each(x).square().mean().backward()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(full(parameter.grad), expected.grad, rtol=1e-5, atol=1e-6, msg=name)


@two_ranks
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_every_parameter_begins_at_a_multiple_of_16_bytes(param_dtype: torch.dtype | None) -> None:
    model = Pointers()
    made(model, "uncompiled", mesh=replicated(), mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    model(torch.ones(2)).sum().backward()
    assert model.found == [0] * 6


@two_ranks
def test_only_what_would_begin_elsewhere_is_copied() -> None:
    model = Rope()
    run = made(model, "eager", mesh=replicated())
    run(torch.ones(3, 4, 2))
    (compiled,) = fxshard.compiled_graphs(run)
    assert compiled.text.count("fxshard.copy(") == 2, compiled.text  # `scale` and `more` lie well
