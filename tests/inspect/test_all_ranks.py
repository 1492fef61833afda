"""Graphs run for all ranks in lockstep: what torch's LocalTensor computes, to the bit, without a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxshard import UnsupportedGraph
from fxshard.inspect.all_ranks import run
from fxshard.ir import collectives, ops, tags
from fxshard.passes.insert_collectives import InsertCollectives
from tests.graphs import SPLIT, Traced, doubles, two_dtypes, two_layers, uneven
from tests.steps import batch_of, shard_of, step

X = torch.ones(2)


@pytest.mark.parametrize("model", [two_layers, uneven, doubles, two_dtypes], ids=lambda model: model.__name__)
def test_runs_graphs_to_the_bit_as_all_ranks_together_would(model: Callable[[], Traced]) -> None:
    traced = model()
    expected, ranks = step(traced), range(traced.world_size)
    forward_graph, backward_graph = (traced.at(kind, after=InsertCollectives)[0].graph for kind in SPLIT)
    forward = run(forward_graph, inputs_of(traced, forward_graph), {}, keep=False)
    assert all(torch.equal(a, b) for a, b in zip(forward.results[0], expected.outputs, strict=True))
    results: Any = forward_graph.output_node().args[0]
    saved = {result.name: value for result, value in zip(results, forward.results, strict=True)}
    tangents = tuple(batch_of(traced, rank)[1] for rank in ranks)
    inputs = {n.name: saved.get(n.name, tangents) for n in backward_graph.find_nodes(op="placeholder")}
    backward = run(backward_graph, inputs, {}, keep=False)
    for i, (unit, shard_index) in traced.plan.shard_inputs.items():
        for slot in traced.plan.units[unit].shards[shard_index].slots:
            pieces = [flat[slot.offset : slot.offset + slot.numel] for flat in backward.results[i]]
            assert torch.equal(torch.cat(pieces)[: slot.full_numel].view(slot.shape), expected.grads[slot.fqn])


def inputs_of(traced: Traced, forward: fx.Graph) -> dict[str, tuple[Tensor, ...]]:
    parameters, ranks = dict(traced.module.named_parameters()), range(traced.world_size)
    inputs = {}
    for i, placeholder in enumerate(forward.find_nodes(op="placeholder")):
        inputs[placeholder.name] = tuple(batch_of(traced, rank)[0] for rank in ranks)
        if i in traced.plan.shard_inputs:
            unit, index = traced.plan.shard_inputs[i]
            plan = traced.plan.units[unit].shards[index]
            inputs[placeholder.name] = tuple(shard_of(plan, parameters, rank, traced.world_size) for rank in ranks)
    return inputs


@pytest.mark.parametrize(
    ("op", "dtype", "expected"), [("sum", torch.float64, 3.0), ("avg", torch.float32, 1.5)], ids=["sum", "avg"]
)
def test_reduces_in_the_order_of_the_ranks(op: str, dtype: torch.dtype, expected: float) -> None:
    graph = fx.Graph()
    launch = graph.call_function(collectives.REDUCE_SCATTER, (graph.placeholder("x"), op, 2, "group"))
    graph.output(graph.call_function(collectives.WAIT, (launch,)))
    rows = tuple(torch.tensor([value, 10 * value], dtype=dtype) for value in (1.0, 2.0))
    (result,) = run(graph, {"x": rows}, {}, keep=False).results
    assert [part.tolist() for part in result] == [[expected], [10 * expected]]


def test_copies_an_offloaded_shard_to_its_device_and_back() -> None:
    graph = fx.Graph()
    there = graph.call_function(ops.COPY_TO_DEVICE, (graph.placeholder("x"), "meta", tags.TO_DEVICE))
    graph.output([graph.call_function(collectives.WAIT, (there,))])
    (result,) = run(graph, {"x": (torch.zeros(2), torch.zeros(2))}, {}, keep=False).results
    assert [value.device.type for value in result] == ["meta", "meta"]


def test_refuses_collectives_of_others() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "group")))
    with pytest.raises(UnsupportedGraph, match="%all_reduce_default is _c10d_functional"):
        run(graph, {"x": (X, X)}, {}, keep=True)
