"""Hand-made graphs of any length, as the passes leave them: a plan, tags, launches, waits and matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxshard.ir import tags
from fxshard.ir.plan import FramePlan, ParameterSpec, UnitPlan, lay_out

WORLD_SIZE, WIDTH, ROWS = 4, 64, 24
GROUP = "0"

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


class Builder:
    """Appends calls to a graph and gives each its fake value."""

    def __init__(self, *, dynamic: bool = False) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.dynamic = dynamic

    def input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **tagged: Any) -> fx.Node:
        """A graph input; the first dim of a matrix is symbolic if the graph is dynamic."""
        node = self.graph.placeholder(name)
        sizes = [DimDynamic.STATIC] * len(shape)
        if self.dynamic and len(shape) == 2:
            sizes[0] = DimDynamic.DYNAMIC
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=sizes)
        node.meta["val"] = self.mode.from_tensor(torch.empty(shape, dtype=dtype), symbolic_context=context)
        tags.tag(node, **tagged)
        return node

    def call(self, target: Callable[..., Any], *args: Any, name: str | None = None, **tagged: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        tags.tag(node, **tagged)
        return node

    def gather(self, flat: fx.Node, unit: str) -> fx.Node:
        return self.call(_c10d.all_gather_into_tensor.default, flat, WORLD_SIZE, GROUP, calls=((unit, "0"),))

    def wait(self, launch: fx.Node) -> fx.Node:
        return self.call(_c10d.wait_tensor.default, launch)

    def finish(self, *results: fx.Node) -> fx.Graph:
        self.graph.output(tuple(results))
        return self.graph


def unit_plan(fqn: str, world_size: int = WORLD_SIZE) -> UnitPlan:
    """A square matrix and a vector, so that the matrix has to be copied out of the gathered buffer."""
    specs = [
        ParameterSpec(fqn=f"{fqn}.weight", shape=(WIDTH, WIDTH), dtype=torch.float32, trainable=True),
        ParameterSpec(fqn=f"{fqn}.bias", shape=(WIDTH,), dtype=torch.float32, trainable=True),
    ]
    return UnitPlan(fqn=fqn, shards=lay_out(specs, world_size), world_size=world_size, group=GROUP)


def graph(layers: int, *, dynamic: bool = False, pointwise: int = 90) -> tuple[fx.Graph, FramePlan]:
    """A forward graph of `layers` units with about `pointwise + 10` nodes each, and its plan."""
    units = {f"layers.{i}": unit_plan(f"layers.{i}") for i in range(layers)}
    build = Builder(dynamic=dynamic)
    x = build.input("x", (ROWS, WIDTH))
    flats = [
        build.input(f"flat_{i}", (unit.shards[0].numel,), shard=tags.ShardKey(key, 0))
        for i, (key, unit) in enumerate(units.items())
    ]
    saved = []
    for flat, (key, unit) in zip(flats, units.items(), strict=True):
        weight_slot, bias_slot = unit.shards[0].slots
        full = build.call(_aten.view.default, build.wait(build.gather(flat, key)), [WORLD_SIZE, unit.shards[0].numel])
        columns = build.call(_aten.slice.Tensor, full, 1, 0, weight_slot.numel)
        weight = build.call(
            _aten.view.default, build.call(_aten.clone.default, columns), [WIDTH, WIDTH], param=weight_slot.fqn
        )
        columns = build.call(_aten.slice.Tensor, full, 1, bias_slot.offset, bias_slot.offset + bias_slot.numel)
        bias = build.call(_aten.view.default, build.call(_aten.clone.default, columns), [WIDTH], param=bias_slot.fqn)
        x = build.call(_aten.addmm.default, bias, x, weight)
        saved.append(x)
        for _ in range(pointwise // 2):
            x = build.call(_aten.relu.default, build.call(_aten.t.default, build.call(_aten.t.default, x)))
    return build.finish(x, *saved), FramePlan(units=units, shard_inputs={})
