"""How types and arguments print: alike on every rank, machine and release of torch."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.ir.text import dtype_text, type_text
from tests.nodes import graph_of_inputs, node_text

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-05, "1e-05"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        ("sum", "'sum'"),
        ("two\nlines", r"'two\nlines'"),
        (torch.Size([2, 3]), "[2, 3]"),
        ((slice(None), slice(0, 4), slice(None, None, 2), 0), "[:, 0:4, ::2, 0]"),
        (torch.float16, "f16"),
        (torch.strided, "strided"),
        (torch.channels_last, "channels_last"),
        (torch.device("cpu"), "device"),
        ("cuda:1", "device"),
        (aten.add.Tensor, "aten.add.Tensor"),
        (torch.ops._c10d_functional.wait_tensor, "c10d.wait_tensor"),
        (operator.getitem, "getitem"),
        (CheckpointPolicy.MUST_SAVE, "CheckpointPolicy.MUST_SAVE"),
        ({"a": [1, None]}, "{'a': [1, None]}"),
        ([16] * 8, "[16] * 8"),
        ([True, 1, 1, 1, 1, 1, 1, 1], "[True, 1, 1, 1, 1, 1, 1, 1]"),
    ],
    ids=str,
)
def test_writes_arguments_alike_everywhere(value: Any, text: str) -> None:
    graph, (x,) = graph_of_inputs("x")
    assert node_text(graph.call_function(torch.neg, (x, value))) == f"%neg = neg(%x, {text})"


def test_leaves_out_devices_and_pinning() -> None:
    graph, _ = graph_of_inputs()
    node = graph.call_function(
        aten.empty.memory_format,
        ([2, 2],),
        {"dtype": torch.int64, "layout": torch.strided, "device": torch.device("cuda:1"), "pin_memory": False},
    )
    assert node_text(node) == "%empty_memory_format = aten.empty.memory_format([2, 2], dtype=i64, layout=strided)"


def test_leaves_out_addresses() -> None:
    class Callback:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    graph, (x,) = graph_of_inputs("x")
    line = node_text(graph.call_function(Callback(), (x,), name="call"))
    assert "Callback" in line
    assert not re.search(r"0x[0-9a-f]+", line)


def test_shortens_the_namespace_of_collectives() -> None:
    graph, (x,) = graph_of_inputs("x")
    node = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))
    assert node_text(node) == "%wait_tensor_default = c10d.wait_tensor(%x)"


def test_writes_symbolic_sizes_as_expressions() -> None:
    size = ShapeEnv().create_unbacked_symint()
    _, (n, x) = graph_of_inputs("n", "x")
    n.meta["val"] = size
    x.meta["val"] = torch.empty(2 * size, 4, device="meta")
    assert [node_text(n), node_text(x)] == ["%n: Sym(u0) = input", "%x: f32[2*u0, 4] = input"]


def test_writes_the_types_of_a_tuple() -> None:
    _, (x,) = graph_of_inputs("x")
    x.meta["val"] = (torch.empty(3), None, torch.empty(2, dtype=torch.int64), 7)
    assert type_text(x) == "(f32[3], NoneType, i64[2], int)"


def test_reads_types_from_a_graph_of_dynamo() -> None:
    _, (x, y) = graph_of_inputs("x", "y")
    x.meta["example_value"] = nn.Parameter(torch.empty(3))
    assert [type_text(x), type_text(y)] == ["f32[3]", ""]


@pytest.mark.parametrize(
    ("dtype", "short"),
    [(torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.bool, "b8"), (torch.float8_e4m3fn, "float8_e4m3fn")],
)
def test_shortens_dtypes(dtype: torch.dtype, short: str) -> None:
    assert dtype_text(dtype) == short
