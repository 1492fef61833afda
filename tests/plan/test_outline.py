"""Outlined traces: a block of each kind, and what is around the blocks."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.cost.stats import graph_stats
from fxshard.errors import ConfigError, UnsupportedGraph
from fxshard.inspect.explanation import Explanation
from fxshard.ir.planned_block import number_of
from fxshard.plan.outline import OutlinedModel, outline
from tests.models import Doing
from tests.plan.models import LAYERS, Stack, build

OPTIONS: dict[str, Any] = {"lower": "eager", "hardware": "h100-sxm"}


@functools.cache
def outlined(layers: int = LAYERS) -> OutlinedModel:
    _, args = build()
    with torch.device("meta"):
        model = Stack(layers)
    return outline(model, args, {}, world_size=8, options=OPTIONS)


def flops(explanation: Explanation, stage: str) -> float:
    (frame,) = explanation.frames
    return float(graph_stats(frame.running(stage).graph, frame.plan, frame.hardware).evaluate().flops)


def test_blocks_that_are_alike_are_traced_once_and_called_in_their_order() -> None:
    found = outlined()
    assert found.blocks is not None
    assert len(found.blocks.frames) == 1
    assert found.order == (0, 0, 0)
    graph = found.outer.frames[0].running("forward").graph
    assert [number for node in graph.nodes if (number := number_of(node)) is not None] == [0, 1, 2]
    graph = found.outer.frames[0].running("backward").graph
    assert [number for node in graph.nodes if (number := number_of(node)) is not None] == [2, 1, 0]


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_the_parts_have_the_flops_of_the_whole(stage: str) -> None:
    model, args = build()
    whole = fxshard.explain(model, *args, world_size=8, options=OPTIONS)
    found = outlined()
    assert found.blocks is not None
    assert flops(whole, stage) == flops(found.outer, stage) + LAYERS * flops(found.blocks, stage) > 0


def test_depth_does_not_make_graphs_longer() -> None:
    short, deep = outlined(), outlined(LAYERS + 4)
    assert short.blocks is not None
    assert deep.blocks is not None
    lengths = [len(each.blocks.frames[0].running("backward").graph.nodes) for each in (short, deep) if each.blocks]
    assert lengths[0] == lengths[1]
    assert len(deep.order) == LAYERS + 4


def test_a_model_without_blocks_is_one_graph() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(64, 1), torch.empty(8, 64)
    found = outline(Doing(lambda m, x: m.model(x).sum(), model=model), (x,), {}, world_size=8, options=OPTIONS)
    assert (found.blocks, found.order) == (None, ())


class _Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x.sum()


class _Reads(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


class _None(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).sum()


class _Breaks(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(self.blocks[0](x)).sum()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (_Twice, ConfigError, "blocks.0 is called more than once in a forward"),
        (_Reads, UnsupportedGraph, "the forward of _Reads reads values of a tensor"),
        (_None, ConfigError, "_None.forward calls none of its 3 blocks"),
        (_Breaks, ConfigError, "around its blocks is captured in 2 graphs, and a plan needs"),
    ],
)
def test_a_model_that_cannot_be_planned_is_named_with_the_fix(
    kind: type[Stack], error: type[Exception], message: str
) -> None:
    with torch.device("meta"):
        model = kind()
    with pytest.raises(error, match=message):
        outline(model, build()[1], {}, world_size=8, options=OPTIONS)


def test_a_block_that_returns_more_than_tensors_is_refused() -> None:
    with torch.device("meta"):
        blocks = nn.ModuleList(Doing(lambda m, x: (m.linear(x), "name"), linear=nn.Linear(8, 8)) for _ in range(2))
        model, x = Doing(lambda m, x: m.blocks[1](m.blocks[0](x)[0])[0].sum(), blocks=blocks), torch.empty(4, 8)
    with pytest.raises(ConfigError, match=r"blocks.0 returns tuple with other values than tensors"):
        outline(model, (x,), {}, world_size=8, options=OPTIONS)
