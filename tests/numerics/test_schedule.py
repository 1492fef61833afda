"""The order in Inductor's code is the order of the graph, and no order changes a bit of what is computed."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.pipeline import Pipeline, default
from fxshard.passes.sink_waits import SinkWaits
from tests import graphs
from tests.graphs import Layers
from tests.models import Doing, matrix
from tests.numerics.generated_code import KERNELS, WIDTH, Blocks, compiled, in_code, in_graph, num_kernels
from tests.pairwise import pairwise, slow
from tests.schedules import MODELS, model_of
from tests.steps import Step, assert_same_step, step


class Own(nn.Module):
    """Gives its matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> Tensor:
        return self.weight + 0


class Hazard(nn.Module):
    """An early and a late pointwise operation on `x`; where they are fused, the second unit is waited for early."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Own() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.layers
        early = x.sin()
        product = early @ first() @ x
        late = x.cos() + second()
        return product, late


# ---- what runs, in order


def unpinned(pipeline: Pipeline) -> Pipeline:
    return dataclasses.replace(pipeline, last=(), codegen=pipeline.codegen[:1])


@pytest.mark.parametrize(
    "options",
    [slow({"prefetch": 0}), slow({"prefetch": 1}), slow({"prefetch": 2}), {"prefetch": 2, "bucket": "auto"}],
    ids=["0", "1", "2", "2-auto"],
)
@pytest.mark.parametrize("model", [Blocks, pytest.param(graphs.TwoLayers, marks=pytest.mark.slow)])
def test_makes_code_in_the_order_of_the_graph(model: type[nn.Module], options: dict[str, Any]) -> None:
    width = WIDTH if model is Blocks else graphs.WIDTH
    codes, last = compiled(model(), torch.randn(8, width), **options)
    for code, graph in zip(codes, last, strict=True):
        assert in_code(code) == in_graph(graph)
        assert [text for text in in_code(code) if text in KERNELS]


def test_keeps_the_order_where_a_fusion_would_wait_early() -> None:
    codes, last = compiled(Hazard(), torch.randn(WIDTH, WIDTH))
    expected = ["prefetched_all_gather 0", "prefetched_all_gather 1", "wait 0 of prefetched_all_gather 0"]
    assert in_code(codes[0]) == [*expected, "mm", "mm", "wait 0 of prefetched_all_gather 1"]
    assert [in_code(code) for code in codes] == [in_graph(graph) for graph in last]


def test_loses_the_order_there_without_pins() -> None:
    """The test before could fail: without pins the second unit is waited for before the products that hide it."""
    codes, last = compiled(Hazard(), torch.randn(WIDTH, WIDTH), passes=unpinned)
    code, graph = in_code(codes[0]), in_graph(last[0])
    assert Counter(code) == Counter(graph)
    assert code != graph
    assert code.index("wait 0 of prefetched_all_gather 1") < code.index("mm")


@pytest.mark.slow
@pytest.mark.parametrize("model", [slow(Blocks), graphs.TwoLayers])
def test_makes_no_more_kernels_with_pins_than_without(model: type[nn.Module]) -> None:
    x = torch.randn(WIDTH, graphs.WIDTH if model is graphs.TwoLayers else WIDTH)
    with_pins, _ = compiled(model(), x)
    without, _ = compiled(model(), x, passes=unpinned)
    for code, other in zip(with_pins, without, strict=True):
        assert num_kernels(code) <= num_kernels(other)


def expert() -> nn.Module:
    return Doing(lambda m, x: torch.bmm(x, m.weight), weight=matrix(4, WIDTH, WIDTH))


@pytest.mark.slow
def test_takes_templates_for_pinned_products() -> None:
    templates = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    x = torch.randn(4, 2 * WIDTH, WIDTH)
    with_pins, _ = compiled(Layers(2, expert), x, inductor=templates)
    without, _ = compiled(Layers(2, expert), x, inductor=templates, passes=unpinned)
    counts, expected = ([num_kernels(code).total() for code in codes] for codes in (with_pins, without))
    assert counts == expected


# ---- numbers


@functools.cache
def step_of(model: str, prefetch: int | str, buffers: int) -> Step:
    pipeline = default(prefetch=prefetch, reduce_scatter_max_input_buffers=buffers, lower="eager")
    order = [p for p in pipeline.split if isinstance(p, SinkWaits | HoistPrefetch)]
    return step(model_of(model), *order)


@pairwise(model=MODELS, prefetch=[0, 1, 2], buffers=[1, 2, 4])
def test_computes_the_same_bits_in_any_order(model: str, prefetch: int, buffers: int) -> None:
    assert_same_step(step_of(model, prefetch, buffers), step(model_of(model)), rtol=0, atol=0)
