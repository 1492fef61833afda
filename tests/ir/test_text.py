"""The format of graphs: one line per node, and nothing in it that differs between ranks, machines or releases."""

from __future__ import annotations

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard.ir.text import dtype_text, graph_text, node_text, window

aten = torch.ops.aten


def graph_of_inputs(*names: str) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    return graph, [graph.placeholder(name) for name in names]


def test_writes_a_line_per_node() -> None:
    graph, (x, w) = graph_of_inputs("x", "w")
    x.meta["val"] = torch.empty(2, 4)
    w.meta["val"] = torch.empty(4, 3, dtype=torch.bfloat16)
    mm = graph.call_function(aten.mm.default, (x, w))
    mm.meta["val"] = torch.empty(2, 3)
    summed = graph.call_function(aten.sum.dim_IntList, (mm, [0], True))
    summed.meta["val"] = torch.empty(1, 3)
    graph.output((summed, None, mm))
    assert_expected_inline(
        graph_text(graph),
        """\
%x: f32[2, 4] = input
%w: bf16[4, 3] = input
%mm_default: f32[2, 3] = aten.mm(%x, %w)
%sum_dim_int_list: f32[1, 3] = aten.sum.dim_IntList(%mm_default, [0], True)
return %sum_dim_int_list, None, %mm_default""",
    )


def test_writes_one_result_without_brackets() -> None:
    graph, (x,) = graph_of_inputs("x")
    assert node_text(graph.output(x)) == "return %x"


def test_sorts_what_our_passes_note_on_a_node() -> None:
    _, (x,) = graph_of_inputs("x")
    x.meta["fxshard"] = {"unit": "blocks.0", "bucket": 1}
    assert node_text(x) == "%x = input  # bucket=1  # unit=blocks.0"


def test_leaves_out_devices_and_pinning() -> None:
    graph, _ = graph_of_inputs()
    node = graph.call_function(
        aten.empty.memory_format,
        ([2, 2],),
        {"dtype": torch.int64, "layout": torch.strided, "device": torch.device("cuda:1"), "pin_memory": False},
    )
    assert node_text(node) == "%empty_memory_format = aten.empty.memory_format([2, 2], dtype=i64, layout=strided)"


def test_leaves_out_stack_traces_and_values() -> None:
    _, (x,) = graph_of_inputs("x")
    x.meta.update(stack_trace='File "/somewhere/model.py", line 3', val=torch.ones(2))
    assert node_text(x) == "%x: f32[2] = input"


def test_shortens_the_namespace_of_collectives() -> None:
    graph, (x,) = graph_of_inputs("x")
    node = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))
    assert node_text(node) == "%wait_tensor_default = c10d.wait_tensor(%x)"


def test_writes_python_functions_by_name() -> None:
    graph, (x,) = graph_of_inputs("x")
    assert node_text(graph.call_function(operator.getitem, (x, 0))) == "%getitem = getitem(%x, 0)"


def test_writes_calls_of_modules_and_methods() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()
            self.bias = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.relu(x) + self.bias
            return y.sum()

    assert_expected_inline(
        graph_text(fx.symbolic_trace(Model()).graph),
        """\
%x = input
%relu = call_module.relu(%x)
%bias = get_attr.bias()
%add = add(%relu, %bias)
%sum_1 = call_method.sum(%add)
return %sum_1""",
    )


def test_writes_symbolic_sizes() -> None:
    size = ShapeEnv().create_unbacked_symint()
    _, (n, x) = graph_of_inputs("n", "x")
    n.meta["val"] = size
    x.meta["val"] = torch.empty(size, 4, device="meta")
    assert [node_text(n), node_text(x)] == ["%n: Sym(u0) = input", "%x: f32[u0, 4] = input"]


@pytest.mark.parametrize(
    ("dtype", "short"),
    [(torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.bool, "b8"), (torch.float8_e4m3fn, "float8_e4m3fn")],
)
def test_shortens_dtypes(dtype: torch.dtype, short: str) -> None:
    assert dtype_text(dtype) == short


def test_marks_a_node_among_its_neighbours() -> None:
    graph, (x,) = graph_of_inputs("x")
    nodes = [x]
    for _ in range(5):
        nodes.append(graph.call_function(torch.neg, (nodes[-1],)))
    assert_expected_inline(
        window(nodes[3], lines=1),
        """\
   %neg_1 = neg(%neg)
-> %neg_2 = neg(%neg_1)
   %neg_3 = neg(%neg_2)""",
    )


def test_gives_a_graph_the_same_text_twice() -> None:
    graph, (x,) = graph_of_inputs("x")
    graph.output(graph.call_function(torch.neg, (x,)))
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    assert graph_text(copied) == graph_text(graph)
