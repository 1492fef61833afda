"""The code that Inductor makes of small models: what it launches, waits for and calls, in order."""

from __future__ import annotations

import ast
import re
from collections import Counter
from typing import Any

from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor.utils import run_and_get_code
from torch.utils.flop_counter import flop_registry

import fxshard
from fxshard.ir import collectives, launches
from tests import fake_ranks, graphs
from tests.graphs import SPLIT, Layers
from tests.models import FeedForward
from tests.numerics.harness import compile_module

KERNELS = frozenset(str(packet).removeprefix("aten.") for packet in flop_registry)

NO_CACHE = {"fx_graph_cache": False}  # a hit would give no code to look at

LAUNCH = re.compile(r"all_gather|reduce_scatter")

WIDTH = 16


class Blocks(Layers):
    """Three blocks with a norm, two matrix products and a residual connection: much for Inductor to fuse."""

    def __init__(self) -> None:
        super().__init__(3, lambda: FeedForward(WIDTH, 2 * WIDTH, norm=True))


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
    """The code of forward and backward, and the graphs that it was made of; each unit has launches of its own."""
    with fake_ranks.fake_ranks(2) as mesh, functorch_config.patch(enable_autograd_cache=False):
        policy = options.pop("policy", fxshard.MixedPrecisionPolicy())
        for unit in graphs.layers_of(model):
            fxshard.fully_shard(unit, mesh=mesh, mp_policy=policy)
        inductor = {**NO_CACHE, **options.pop("inductor", {})}
        run = compile_module(model, {"schedule": "fsdp2", **options, "inductor": inductor})

        def train_step() -> None:
            results = run(x)
            sum(result.sum() for result in (results if isinstance(results, tuple) else (results,))).backward()

        _, codes = run_and_get_code(train_step)
        stages = fxshard.explanation_of(run).graphs
        return codes, [list(stages[f"{kind}_codegen"].values())[-1].graph for kind in SPLIT]
