"""Models whose launches are worth scheduling, the passes that make a schedule, and how it is read."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxshard import MixedPrecisionPolicy
from fxshard.cost.bucket_sizes import MIB
from fxshard.hardware import BUILTIN
from fxshard.ir import collectives, launches, ops, pins, tags
from fxshard.passes._base import GraphKind, GraphPass, PassContext
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.sink_waits import SinkWaits
from tests import graphs
from tests.graphs import Layers, Traced, assert_golden, layers_of, run_pass, text, trace

LAYER = 20 * 4 * 2 / 2 / MIB
"""MiB of a gathered layer: 20 floats."""

SCHEDULE: tuple[GraphPass, ...] = (SinkWaits(), HoistPrefetch(depth=1))
"""What makes the order of the launches and waits."""

BUCKETS: Mapping[str, tuple[GraphPass, ...]] = {
    "inserted": (),
    "coalesced": (CoalesceCollectives(),),
    "merged": (BucketCollectives(size=2 * LAYER),),
    "split": (BucketCollectives(size=0.9 * LAYER),),
}
"""Passes that run before, and change what a launch moves."""

SCHEDULED = {name: (*passes, *SCHEDULE) for name, passes in BUCKETS.items()}

Lists = Mapping[str, tuple[str, ...] | None]
"""Unit -> what it is to prefetch."""

DEAR_TENSORS = dataclasses.replace(BUILTIN["cpu"], gather_tensor_overhead=1.0, reduce_tensor_overhead=1.0)
"""A tensor costs more than a copy of anything."""

DEAR_KERNELS = dataclasses.replace(BUILTIN["cpu"], kernel_overhead=2e-6, gather_tensor_overhead=1e-6)
"""A copy by a kernel of its own costs more than a tensor, one within another kernel less."""

DEAR_COPIES = dataclasses.replace(BUILTIN["cpu"], gather_tensor_overhead=1e-9, reduce_tensor_overhead=1e-9)
"""A copy of anything costs more than a tensor."""

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Rooted(Layers):
    """Layers between two matrices of the root, which stays gathered around them."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.first, self.last = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.first) @ self.last


class Repeated(Layers):
    """Calls all its layers twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def four_layers(**kwargs: Any) -> Traced:
    return trace(Layers(4), units=layers_of, **kwargs)


def mixed_layers(**kwargs: Any) -> Traced:
    return trace(Layers(3), units=layers_of, mp_policy=BF16, **kwargs)


def layers_of_two_dtypes(**kwargs: Any) -> Traced:
    """Three layers, each with a float32 matrix and a bfloat16 vector."""
    model = Layers(3)
    for layer in layers_of(model)[:-1]:
        layer.bias = nn.Parameter(torch.randn(4).bfloat16())
    return trace(model, units=layers_of, **kwargs)


def repeated(**kwargs: Any) -> Traced:
    return trace(Repeated(2), units=layers_of, **kwargs)


def rooted(**kwargs: Any) -> Traced:
    return trace(Rooted(3), units=layers_of, **kwargs)


def kept(**kwargs: Any) -> Traced:
    return trace(Layers(3), units=layers_of, reshard_after_forward=False, **kwargs)


class TiedHead(Layers):
    """A root whose head is read twice, after the layers: its gradient is a sum that is complete early in backward."""

    def __init__(self) -> None:
        super().__init__(2)
        self.first, self.head = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.first) @ self.head @ self.head


def tied_head(**kwargs: Any) -> Traced:
    """Two layers, and a root that sends an early sum and a late gradient."""
    return trace(TiedHead(), units=layers_of, **kwargs)


def doubles(**kwargs: Any) -> Traced:
    """Two layers in float64 on four ranks, whose gradients are divided before and after the reduction."""
    return trace(Layers(2).double(), units=layers_of, **{"world_size": 4, **kwargs})


MODELS: dict[str, Callable[..., Traced]] = {
    "two_layers": graphs.two_layers,
    "four_layers": four_layers,
    "mixed_precision": mixed_layers,
    "two_dtypes": layers_of_two_dtypes,
    "called_twice": repeated,
    "root": rooted,
    "doubles": doubles,
    "tied_head": tied_head,
    "kept": kept,
}


@functools.cache
def model_of(name: str, **kwargs: Any) -> Traced:
    """A model, traced once for all tests, which edit copies of its graphs."""
    return MODELS[name](**kwargs)


def with_lists(traced: Traced, *, forward: Lists | None = None, backward: Lists | None = None) -> Traced:
    """The model whose user has listed what units are to prefetch."""
    units = dict(traced.plan.units)
    for unit, listed in (forward or {}).items():
        units[unit] = dataclasses.replace(units[unit], forward_prefetch=listed)
    for unit, listed in (backward or {}).items():
        units[unit] = dataclasses.replace(units[unit], backward_prefetch=listed)
    return dataclasses.replace(traced, plan=dataclasses.replace(traced.plan, units=units))


def after_passes(
    traced: Traced, kind: GraphKind, *passes: GraphPass, **context: Any
) -> tuple[fx.GraphModule, PassContext]:
    """A graph with its collectives after these passes, and what they said; `context` replaces what they are told."""
    gm, ctx = traced.at(kind, after=InsertCollectives)
    ctx = dataclasses.replace(ctx, **context)
    for step in passes:
        run_pass(step, gm, ctx)
    return gm, ctx


def schedule_text(graph: fx.Graph) -> str:
    """The schedule of a graph: what it launches, waits for, computes and copies on a side stream, and what it returns.

    Inductor fuses all else into these or runs it where it likes; `ir.text.graph_text` has everything.
    """
    shown = [node for node in graph.nodes if _is_shown(node)]
    results = {user.name: node.name for node in shown for user in node.users if user.target is operator.getitem}
    returned = [node.name for node in graph.output_node().all_input_nodes if _is_shown(node)]
    return "\n".join([*(_line(node, results) for node in shown), f"return {', '.join(returned)}".rstrip()])


def _is_shown(node: fx.Node) -> bool:
    copies = bool(tags.meta_of(node).stream) and node.target not in (operator.getitem, *ops.VIEWS)
    return collectives.is_launch(node) or collectives.is_wait(node) or launches.is_kernel(node) or copies


def _line(node: fx.Node, results: Mapping[str, str]) -> str:
    """The name, the op if it is one of ours, and what else decides when it runs; `results` -> what they are of."""
    meta = tags.meta_of(node)
    said = {"after": meta.after, "control_deps": meta.control_deps, "stream": (meta.stream,) if meta.stream else ()}
    namespace, _, op = str(node.target).removesuffix(".default").partition(".")
    is_ours = namespace == "fxshard" and (collectives.is_launch(node) or collectives.is_wait(node))
    if is_ours and "role" in (given := collectives.arguments_of(node)):
        said["role"] = (given["role"],)
    comments = (f"  # {key}={','.join(results.get(name, name) for name in said[key])}" for key in said if said[key])
    return (f"{node.name} = {op}" if is_ours else node.name) + "".join(comments)


def schedule_of(gm: fx.GraphModule) -> str:
    """When what runs, one line each."""
    return schedule_text(pins.inlined(gm.graph))


def events(gm: fx.GraphModule, *, launch: str, wait: str) -> str:
    """The schedule in one line: launches and waits with names that begin like this, by their layers, and products."""
    found = []
    for name in (line.partition(" ")[0] for line in schedule_of(gm).splitlines()):
        if name.startswith((launch, wait)):
            found.append(name.replace(f"{wait}layers_", "wait").replace(f"{launch}layers_", "launch"))
        elif name.startswith("mm"):
            found.append("mm")
    return " ".join(found)


def assert_schedule(gm: fx.GraphModule, name: str, *, whole: bool = False) -> None:
    """Compare the schedule with `tests/golden/<name>.txt`; `whole` where a pass does more than to reorder."""
    assert_golden(f"{schedule_of(gm)}\n\n{renumbered(gm)}" if whole else schedule_of(gm), name)


def renumbered(gm: fx.GraphModule) -> str:
    """The whole graph, its views numbered in order: torch counts them differently from release to release."""
    names: dict[str, str] = {}
    return re.sub(r"%view(?:_\d+)?\b", lambda found: names.setdefault(found[0], f"%view_{len(names)}"), text(gm))
