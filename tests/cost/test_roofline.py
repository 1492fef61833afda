"""ComputeModel: FLOPs and bytes of single nodes, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxshard.cost.roofline import FREE, ComputeModel, NodeCost
from fxshard.cost.symbols import Point, hints_of
from fxshard.hardware import HardwareSpec
from fxshard.ir.liveness import liveness
from tests.cost.big import Builder

aten = torch.ops.aten
F32, BF16 = 4, 2  # bytes

HARDWARE = HardwareSpec(
    name="test",
    peak_flops={"f32": 1024.0, "bf16": 4096.0},
    memory_bandwidth=256.0,
    link_latency=1.0,
    link_bandwidth=2048.0,
    memory_gib=1,
    kernel_overhead=0.5,
    gather_tensor_overhead=0.0,
    reduce_tensor_overhead=0.0,
)


def cost_of(make: Callable[[Builder], fx.Node], *, dynamic: bool = False) -> NodeCost:
    build = Builder(dynamic=dynamic)
    node = make(build)
    graph = build.finish(node)
    return ComputeModel(liveness(graph), HARDWARE, Point(world_size=1, hints=hints_of(graph))).cost(node)


def matrix(build: Builder, name: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> fx.Node:
    return build.input(name, (rows, columns), dtype)


def mm(build: Builder, dtype: torch.dtype = torch.float32) -> fx.Node:
    x, weight = matrix(build, "x", 32, 16, dtype), build.input("w", (16 * 8,), dtype)
    return build.call(aten.mm.default, x, build.call(aten.view.default, weight, [16, 8]))


def test_a_matrix_product_costs_two_flops_per_multiply_add() -> None:
    flops, nbytes = 2 * 32 * 16 * 8, (32 * 16 + 16 * 8 + 32 * 8) * F32
    assert cost_of(mm) == NodeCost(flops=flops, nbytes=nbytes, seconds=max(flops / 1024, nbytes / 256) + 0.5)


def test_a_large_product_is_bound_by_its_flops() -> None:
    def square(build: Builder) -> fx.Node:
        return build.call(aten.mm.default, matrix(build, "x", 256, 256), matrix(build, "y", 256, 256))

    assert cost_of(square).seconds == 2 * 256**3 / 1024 + 0.5


def test_the_peak_is_that_of_the_dtype() -> None:
    cost = cost_of(lambda build: mm(build, torch.bfloat16))
    nbytes = (32 * 16 + 16 * 8 + 32 * 8) * BF16
    assert cost == NodeCost(flops=8192, nbytes=nbytes, seconds=nbytes / 256 + 0.5)


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ((64, 16), (4, 16, 8), 2 * 64 * 16 * 8),  # rows in four groups, each times its own matrix
        ((16, 64), (64, 8), 2 * 16 * 64 * 8),  # the gradients of these matrices: four groups along the inner dim
        ((4, 16, 8), (4, 8, 32), 4 * 2 * 16 * 8 * 32),
        ((4, 16, 8), (8, 64), 2 * 16 * 8 * 64),
    ],
)
def test_a_grouped_product_costs_what_its_groups_cost(a: tuple[int, ...], b: tuple[int, ...], flops: int) -> None:
    def grouped(build: Builder) -> fx.Node:
        operands = [build.input(name, shape, torch.bfloat16) for name, shape in (("a", a), ("b", b))]
        offsets = None if len(a) == len(b) == 3 else build.input("offsets", (4,), torch.int32)
        return build.call(aten._grouped_mm.default, *operands, offsets)

    assert cost_of(grouped).flops == flops


def test_a_pointwise_op_is_bound_by_its_bytes() -> None:
    cost = cost_of(lambda build: build.call(aten.relu.default, matrix(build, "x", 4, 8)))
    assert cost == NodeCost(flops=0, nbytes=2 * 32 * F32, seconds=2 * 32 * F32 / 256 + 0.5)


def test_an_expanded_operand_is_read_once() -> None:
    def add(build: Builder) -> fx.Node:
        row = build.call(aten.expand.default, build.input("row", (8,)), [1024, 8])
        return build.call(aten.add.Tensor, matrix(build, "x", 1024, 8), row)

    assert cost_of(add).nbytes == (2 * 1024 * 8 + 8) * F32


def test_an_embedding_reads_only_the_rows_it_returns() -> None:
    def embedding(build: Builder) -> fx.Node:
        return build.call(
            aten.embedding.default, matrix(build, "table", 5000, 8), build.input("ids", (3,), torch.int64)
        )

    assert cost_of(embedding).nbytes == 2 * 3 * 8 * F32 + 3 * 8


def view(build: Builder) -> fx.Node:
    return build.call(aten.t.default, matrix(build, "x", 4, 8))


def empty(build: Builder) -> fx.Node:
    return build.call(aten.empty_like.default, matrix(build, "x", 4, 8))


def launch(build: Builder) -> fx.Node:
    return build.gather(build.input("x", (8,)), "unit")


def marker(build: Builder) -> fx.Node:
    flat = build.input("x", (8,))
    return build.call(torch.ops.fxshard.unshard.default, flat, "u#0@0", 0, [4, 4], torch.float32)


@pytest.mark.parametrize("make", [view, empty, launch, marker, lambda build: matrix(build, "x", 4, 8)])
def test_what_runs_no_kernel_is_free(make: Callable[[Builder], fx.Node]) -> None:
    assert cost_of(make) is FREE


def test_a_write_into_its_argument_is_not_free() -> None:
    cost = cost_of(lambda build: build.call(aten.add_.Tensor, matrix(build, "x", 4, 8), matrix(build, "y", 4, 8)))
    assert cost.nbytes == 3 * 32 * F32


def attention(op: Any) -> Callable[[Builder], fx.Node]:
    def make(build: Builder) -> fx.Node:
        q, k, v = (build.input(name, (2, 4, 16, 8)) for name in "qkv")
        return build.call(op, q, k, v)

    return make


@pytest.mark.parametrize(
    "op",
    [
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ],
)
def test_every_attention_kernel_costs_its_two_products(op: Any) -> None:
    assert cost_of(attention(op)).flops == 2 * (2 * 2 * 4 * 16 * 16 * 8)


def test_a_convolution_costs_a_product_per_output_pixel() -> None:
    def convolution(build: Builder) -> fx.Node:
        x, weight = build.input("x", (1, 3, 8, 8)), build.input("w", (6, 3, 3, 3))
        return build.call(aten.convolution.default, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    assert cost_of(convolution).flops == 2 * 6 * 8 * 8 * 3 * 3 * 3


@pytest.mark.parametrize(("mask", "products"), [([False, True, True], 1), ([True, True, False], 2)])
def test_a_convolutions_backward_costs_a_product_for_each_gradient(mask: list[bool], products: int) -> None:
    """The first convolution of a model gives its input none: then the first result is no tensor."""

    def backward(build: Builder) -> fx.Node:
        grad, x, weight = (
            build.input(*each) for each in (("g", (1, 6, 8, 8)), ("x", (1, 3, 8, 8)), ("w", (6, 3, 3, 3)))
        )
        sizes = [1, 1], [1, 1], [1, 1]
        return build.call(aten.convolution_backward.default, grad, x, weight, [6], *sizes, False, [0, 0], 1, mask)

    assert cost_of(backward).flops == products * 2 * 6 * 8 * 8 * 3 * 3 * 3


def test_a_symbolic_product_costs_an_expression_of_its_rows() -> None:
    cost = cost_of(mm, dynamic=True)
    (rows,) = cost.flops.free_symbols
    assert cost.flops == 2 * rows * 16 * 8
    assert cost.nbytes.subs(rows, 32) == (32 * 16 + 16 * 8 + 32 * 8) * F32
    nbytes = int(cost.nbytes.subs(rows, 32))
    assert float(cost.seconds.subs(rows, 32)) == pytest.approx(max(8192 / 1024, nbytes / 256) + 0.5)


def test_an_op_whose_formula_wants_real_data_costs_its_bytes() -> None:
    def varlen(build: Builder) -> fx.Node:
        x = build.input("x", (2, 16, 4, 8), torch.bfloat16)
        node = build.graph.call_function(
            aten._flash_attention_forward.default, (x, x, x, None, None, 16, 16, 0.0, False, False)
        )
        node.meta["val"] = (x.meta["val"].clone(),)
        return node

    cost = cost_of(varlen)
    assert cost.nbytes == 2 * (2 * 16 * 4 * 8) * BF16
    assert cost.seconds > 0.5
