"""What the tests of this folder explain."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard import Explanation, explain, fully_shard
from fxshard.passes._base import GraphPass, PassContext, Property
from fxshard.passes.pipeline import Pipeline
from tests.graphs import Layer, TwoLayers, layers_of

EAGER: dict[str, Any] = {"lower": "eager"}
X = torch.ones(2, 4)


@functools.cache
def explained(build: Callable[[], nn.Module], world_size: int, **options: Any) -> Explanation:
    """An explanation that tests do nothing but read, made once for all of them."""
    return explain(build(), X, world_size=world_size, options={**EAGER, **options})


def names(passes: tuple[GraphPass, ...]) -> list[str]:
    return ["captured", *(step.name for step in passes)]


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for unit in layers_of(model):
        fully_shard(unit, mesh=mesh)
    return model


def compiled_by_us(model: nn.Module, **options: Any) -> nn.Module:
    return cast(nn.Module, torch.compile(model, backend="fxshard", options=options))


class Broken(TwoLayers):
    """A graph break between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[1](y)


class Doing(nn.Module):
    """A layer, and before it whatever a test wants."""

    def __init__(self, do: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.do = do

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.do(x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decliner(GraphPass):
    """Changes nothing, and says so of the first node."""

    requires = frozenset({Property.COLLECTIVES})
    why: str = "it is only an input"

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        ctx.decline(next(iter(gm.graph.nodes)), self.why)
        return False


def add_decliner(pipeline: Pipeline) -> Pipeline:
    return dataclasses.replace(pipeline, split=(*pipeline.split, Decliner()), last=(Decliner(),))
