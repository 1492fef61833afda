"""The order in Inductor's code is the order of the graph, and no order changes a bit of what is computed."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor.utils import run_and_get_code
from torch.utils.flop_counter import flop_registry

import fxshard
from fxshard.ir import collectives, launches
from fxshard.passes._base import GraphKind
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.pipeline import Pipeline, default
from fxshard.passes.sink_waits import SinkWaits
from tests import graphs
from tests.numerics.harness import compile_module
from tests.pairwise import pairwise, slow
from tests.schedules import MODELS, model_of
from tests.steps import Step, assert_same_step, step

SPLIT: tuple[GraphKind, GraphKind] = ("forward", "backward")
KERNELS = frozenset(str(packet).removeprefix("aten.") for packet in flop_registry)
NO_CACHE = {"fx_graph_cache": False}  # a hit would give no code to look at
LAUNCH = re.compile(r"all_gather|reduce_scatter")
WIDTH = 16


class Block(nn.Module):
    """A norm, two matrix products and a residual connection: much for Inductor to fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + y


class Blocks(nn.Module):
    """Four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


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


def in_graph(graph: fx.Graph) -> list[str]:
    """The launches, waits (of which launch and result) and kernels of a graph."""
    found: list[str] = []
    results: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if collectives.is_launch(node):
            results[node] = f"{node.target._opname} {len(results)}"
            found.append(results[node])
        elif collectives.is_wait(node):
            source = node.args[0]
            launch = source if source in results else source.args[0]
            index = 0 if source in results else source.args[1]
            found.append(f"wait {index} of {results[launch]}")
        elif launches.is_kernel(node):
            found.append(node.target._opname)
    return found


class _Calls(ast.NodeVisitor):
    """The same of the code that Inductor made."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.launches = 0
        self.results: dict[str, tuple[str, int]] = {}  # variable -> launch, which of its results

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        (target, *_) = node.targets
        if not isinstance(target, ast.Name):
            return
        if isinstance(node.value, ast.Call) and LAUNCH.search(ast.unparse(node.value.func)):
            self.results[target.id] = (self.found[-1], 0)
        elif isinstance(node.value, ast.Subscript) and ast.unparse(node.value.value) in self.results:
            launch, _ = self.results[ast.unparse(node.value.value)]
            self.results[target.id] = (launch, ast.literal_eval(node.value.slice))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        path = ast.unparse(node.func).removesuffix(".default").split(".")
        if path[-1] == "wait_tensor":
            names = [name.id for name in ast.walk(node.args[0]) if isinstance(name, ast.Name)]
            launch, index = next(self.results[name] for name in names if name in self.results)
            self.found.append(f"wait {index} of {launch}")
        elif LAUNCH.search(".".join(path)):
            self.found.append(f"{path[-1]} {self.launches}")
            self.launches += 1
        elif path[-1] in KERNELS:
            self.found.append(path[-1])


def body_of(code: str) -> ast.FunctionDef:
    """The function that runs the graph."""
    return next(node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef) and node.name == "call")


def in_code(code: str) -> list[str]:
    """The launches, waits and kernels of Inductor's code."""
    calls = _Calls()
    calls.visit(body_of(code))
    return calls.found


def num_kernels(code: str) -> Counter[str]:
    """How often the code calls what: fused kernels, templates, kernels of libraries."""
    calls = [node for node in ast.walk(body_of(code)) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in calls]
    return Counter("cpp" if name.startswith("cpp_") else name for name in names if "cpp_" in name or "extern_" in name)


def compiled(model: nn.Module, x: Tensor, **options: Any) -> tuple[list[str], list[fx.Graph]]:
    """The code of forward and backward, and the graphs that it was made of."""
    with graphs.fake_ranks(2) as mesh, functorch_config.patch(enable_autograd_cache=False):
        policy = options.pop("policy", fxshard.MixedPrecisionPolicy())
        for unit in graphs.layers_of(model):
            fxshard.fully_shard(unit, mesh=mesh, mp_policy=policy)
        inductor = {**NO_CACHE, **options.pop("inductor", {})}
        run = compile_module(model, {**options, "inductor": inductor})

        def train_step() -> None:
            results = run(x)
            sum(result.sum() for result in (results if isinstance(results, tuple) else (results,))).backward()

        _, codes = run_and_get_code(train_step)
        stages = fxshard.explanation_of(run).graphs
        return codes, [list(stages[f"{kind}_codegen"].values())[-1].graph for kind in SPLIT]


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


@pytest.mark.parametrize("model", [slow(Blocks), graphs.TwoLayers])
def test_makes_no_more_kernels_with_pins_than_without(model: type[nn.Module]) -> None:
    x = torch.randn(WIDTH, graphs.WIDTH if model is graphs.TwoLayers else WIDTH)
    with_pins, _ = compiled(model(), x)
    without, _ = compiled(model(), x, passes=unpinned)
    for code, other in zip(with_pins, without, strict=True):
        assert num_kernels(code) <= num_kernels(other)


class Experts(nn.Module):
    """Two products of batches of matrices, one unit each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


@pytest.mark.slow
def test_takes_templates_for_pinned_products() -> None:
    templates = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    x = torch.randn(4, 2 * WIDTH, WIDTH)
    with_pins, _ = compiled(Experts(), x, inductor=templates)
    without, _ = compiled(Experts(), x, inductor=templates, passes=unpinned)
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
