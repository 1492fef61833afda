"""What fused kernels move, counted by hand."""

from __future__ import annotations

import torch

from fxshard.cost.roofline import ComputeModel
from fxshard.cost.symbols import Point
from fxshard.hardware import BUILTIN
from fxshard.ir.liveness import liveness
from tests.cost.by_hand import HandMade

aten = torch.ops.aten
X = 24 * 64 * 4
"""Bytes of `x`."""


def costs(plan: HandMade, *, fuses: bool = True) -> tuple[list[int], list[float]]:
    """Bytes and seconds of the ops that run, in order."""
    graph = plan.finish(plan.x)
    model = ComputeModel(liveness(graph), BUILTIN["h100"], Point(world_size=1, hints={}), fuses=fuses)
    found = [model.cost(node) for node in graph.nodes if node.op == "call_function" and "view" not in node.name]
    return [cost.nbytes for cost in found], [cost.seconds for cost in found]


def test_a_chain_of_pointwise_ops_reads_once_and_writes_once_and_has_one_overhead() -> None:
    plan = HandMade()
    for _ in range(3):
        plan.x = plan.call(aten.relu.default, plan.x)
    nbytes, seconds = costs(plan)
    assert nbytes == [X, 0, X]
    assert seconds[0] >= BUILTIN["h100"].kernel_overhead
    assert seconds[1] == 0
    assert costs(plan, fuses=False)[0] == [2 * X, 2 * X, 2 * X]


def test_a_matrix_product_between_two_ops_parts_their_kernels() -> None:
    plan = HandMade()
    plan.x = plan.call(aten.relu.default, plan.x)
    plan.product()
    plan.x = plan.call(aten.relu.default, plan.x)
    assert costs(plan)[0] == [2 * X, 2 * X + 64 * 64 * 4, 2 * X]


def test_what_another_kernel_reads_as_well_is_written() -> None:
    plan = HandMade()
    first = plan.call(aten.relu.default, plan.x)
    plan.call(aten.mm.default, first, plan.weight)
    plan.x = plan.call(aten.relu.default, first)
    assert costs(plan)[0] == [2 * X, 2 * X + 64 * 64 * 4, X]


def test_an_input_that_two_ops_of_a_kernel_read_counts_once() -> None:
    plan = HandMade()
    source = plan.x
    plan.x = plan.call(aten.add.Tensor, plan.call(aten.relu.default, source), source)
    assert costs(plan)[0] == [X, X]


def test_a_view_in_a_kernel_is_part_of_it() -> None:
    plan = HandMade()
    flat = plan.call(aten.view.default, plan.call(aten.relu.default, plan.x), [-1])
    plan.x = plan.call(aten.relu.default, flat)
    assert costs(plan)[0] == [X, X]
