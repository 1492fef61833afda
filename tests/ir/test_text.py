"""The format of graphs: one line per node, and nothing in it that differs between ranks, machines or releases."""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.ir import tags
from fxshard.ir.history import Snapshot
from fxshard.ir.tags import NodeMeta, ShardKey
from fxshard.ir.text import graph_text, name_of, window
from tests import graphs
from tests.nodes import graph_of_inputs, node_text

aten = torch.ops.aten


def nodes_of(graph: fx.Graph) -> dict[str, fx.Node]:
    return {node.name: node for node in graph.nodes}


# ---- lines


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
# relu
%relu = call_module.relu(%x)
%bias = get_attr.bias
%add = add(%relu, %bias)
%sum_1 = call_method.sum(%add)
return %sum_1""",
    )


def test_writes_a_call_of_a_subgraph() -> None:
    graph, (x,) = graph_of_inputs("x")
    body = graph.create_node("get_attr", "wrap_body_0")
    graph.call_function(tag_activation_checkpoint, (body, x), {"use_reentrant": False})
    assert_expected_inline(
        graph_text(graph),
        """\
%x = input
%wrap_body_0 = get_attr.wrap_body_0
%tag_activation_checkpoint = tag_activation_checkpoint(%wrap_body_0, %x, use_reentrant=False)""",
    )


def test_gives_a_graph_the_same_text_twice() -> None:
    graph, (x,) = graph_of_inputs("x")
    graph.output(graph.call_function(torch.neg, (x,)))
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    assert graph_text(copied) == graph_text(graph)


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


def test_shows_ten_lines_on_either_side() -> None:
    graph, (node,) = graph_of_inputs("x")
    for _ in range(40):
        node = graph.call_function(torch.neg, (node,))
    middle = nodes_of(graph)["neg_20"]
    assert len(window(middle).splitlines()) == 21


# ---- names


def test_names_inputs_as_the_user_does() -> None:
    graph, (flat, tokens, seen, tangent) = graph_of_inputs("primals_1", "primals_2", "primals_3", "tangents_1")
    tags.tag(flat, shard=ShardKey("layers.0", 0))
    tags.tag(tokens, input="tokens")
    tags.tag(seen, input="batch['seen']")
    graph.output((graph.call_function(torch.add, (flat, tokens)), seen, tangent))
    assert_expected_inline(
        graph_text(graph),
        """\
%shard_layers_0 = input  # flat of layers.0
%tokens = input
%batch_seen = input  # input=batch['seen']
%tangents_1 = input
%add = add(%shard_layers_0, %tokens)
return %add, %batch_seen, %tangents_1""",
    )


def test_numbers_the_flats_of_a_unit_that_has_several() -> None:
    _, (first, second) = graph_of_inputs("primals_1", "primals_2")
    tags.tag(first, shard=ShardKey("", 0))
    tags.tag(second, shard=ShardKey("", 1))
    assert [node_text(first), node_text(second)] == [
        "%shard_root = input  # flat of root",
        "%shard_root_1 = input  # flat 1 of root",
    ]


def test_knows_a_flat_by_the_marker_that_reads_it() -> None:
    graph, (flat,) = graph_of_inputs("l_self_flat")
    marker = graph.call_function(torch.ops.fxshard.unshard.default, (flat, "layers.0#0@0", 1, [4], torch.float32))
    assert name_of(flat) == "shard_layers_0"
    assert node_text(marker) == "%unshard_default = fxshard.unshard(%shard_layers_0, 'layers.0#0@0', 1, [4], f32)"


def test_never_prints_two_nodes_under_one_name() -> None:
    graph, (x, y, z) = graph_of_inputs("primals_1", "primals_2", "primals_3")
    for node in (x, y):
        tags.tag(node, input="add")
    tags.tag(z, input="add.1")
    graph.call_function(torch.add, (x, y))
    assert_expected_inline(
        graph_text(graph),
        """\
%add_1 = input  # input=add
%add_2 = input  # input=add
%add_1_1 = input  # input=add.1
%add = add(%add_1, %add_2)""",
    )


# ---- comments


def test_sorts_what_is_known_of_a_node() -> None:
    _, (x,) = graph_of_inputs("x")
    tags.tag(x, calls=(("blocks.0", "0"),), stream="copy_in")
    x.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert node_text(x) == "%x = input  # recompute=MUST_SAVE  # stream=copy_in  # unit=blocks.0@0"


def test_leaves_out_stack_traces_and_values() -> None:
    _, (x,) = graph_of_inputs("x")
    x.meta.update(stack_trace='File "/somewhere/model.py", line 3', val=torch.ones(2))
    assert node_text(x) == "%x: f32[2] = input"


def calls_in(*stacks: dict[str, Any]) -> fx.Graph:
    """A chain of calls, each with one entry of metadata."""
    graph, (node,) = graph_of_inputs("x")
    for meta in stacks:
        node = graph.call_function(torch.neg, (node,))
        node.meta.update(meta)
    graph.output(node)
    return graph


def in_module(path: str, key: str = "nn_module_stack") -> dict[str, Any]:
    return {key: {"1": ("L['self']", nn.Module), "2": (path, nn.Module)}}


def test_marks_where_the_code_of_another_module_begins() -> None:
    graph = calls_in(
        {"stack_trace": 'File "model.py", line 3'},
        in_module("L['self'].layers.0"),
        in_module("L['self'].layers.0"),
        {},
        {"stack_trace": 'File "model.py", line 4'},
        in_module("L['self'].layers.1"),
        in_module("L['self'].layers.1", "fwd_nn_module_stack"),
        {"stack_trace": "\nGradient addition node due to multiple use of tensor around:"},
        {"stack_trace": 'File "model.py", line 3'},
    )
    assert_expected_inline(
        graph_text(graph),
        """\
%x = input
%neg = neg(%x)
# layers.0
%neg_1 = neg(%neg)
%neg_2 = neg(%neg_1)
%neg_3 = neg(%neg_2)
# root
%neg_4 = neg(%neg_3)
# layers.1
%neg_5 = neg(%neg_4)
# layers.1 (backward)
%neg_6 = neg(%neg_5)
%neg_7 = neg(%neg_6)
# root (backward)
%neg_8 = neg(%neg_7)
return %neg_8""",
    )


@pytest.mark.parametrize(
    "path",
    [
        "L['self'].layers.0",
        "L['self']._modules['layers']._modules['0']",
        "L['fn']._modules['layers']._modules['0']",
        "L['model'].layers[0]",
        "L['fn'].__closure__[0].cell_contents.layers.0",
        "G['model']._orig_mod.layers.0",
        "layers.0",
    ],
)
def test_names_modules_relative_to_the_model(path: str) -> None:
    assert "# layers.0" in graph_text(calls_in(in_module(path))).splitlines()


@pytest.mark.slow
def test_prints_a_large_graph_in_no_time() -> None:
    graph, (node,) = graph_of_inputs("primals_1")
    tags.tag(node, shard=ShardKey("", 0))
    for _ in range(30_000):
        node = graph.call_function(aten.add.Tensor, (node, node))
        node.meta |= in_module("L['self'].layers.0") | {"val": torch.empty(2, 4)}
    start = time.process_time()
    assert len(graph_text(graph).splitlines()) == 30_002
    assert time.process_time() - start < 2


# ---- any graph

NAMES = st.text(alphabet="ab_1.#'[ ", min_size=1, max_size=6)
WORDS = NAMES | st.just("two\nlines")
TAGS = st.builds(
    NodeMeta,
    input=WORDS | st.just(""),
    shard=st.none() | st.builds(ShardKey, NAMES, st.integers(0, 2)),
    param=WORDS | st.just(""),
    grads=st.lists(WORDS, max_size=2).map(tuple),
    calls=st.lists(st.tuples(WORDS, NAMES), max_size=2).map(tuple),
)
PATHS = st.sampled_from(["L['self']", "L['self'].a", "L['self'].a.b", "a"])
METAS = st.fixed_dictionaries(
    {},
    optional={
        "fxshard": TAGS,
        "val": st.sampled_from([torch.empty(2, 3), (torch.empty(1), None), 3, None]),
        "nn_module_stack": PATHS.map(lambda path: {"1": (path, nn.Module)}),
        "fwd_nn_module_stack": PATHS.map(lambda path: {"1": (path, nn.Module)}),
        "stack_trace": st.sampled_from(["", "File 'a.py'\nline 2", "Gradient addition node"]),
        "recompute": st.sampled_from(CheckpointPolicy),
    },
)
CONSTANTS = st.none() | st.integers(-2, 2) | st.floats() | WORDS | st.lists(st.integers(0, 1), max_size=9)


@st.composite
def any_graph(draw: st.DrawFn) -> fx.Graph:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in draw(st.lists(NAMES, min_size=1, max_size=4))]
    for name in draw(st.lists(NAMES, max_size=8)):
        operands = st.sampled_from(nodes)
        args = draw(st.lists(operands | st.lists(operands) | CONSTANTS, max_size=3))
        target: Any = draw(st.sampled_from([torch.neg, aten.add.Tensor, operator.getitem]))
        nodes.append(graph.create_node("call_function", target, tuple(args), name=name))
    for node in nodes:
        node.meta.update(draw(METAS))
    graph.output(draw(st.lists(st.sampled_from(nodes))))
    return graph


@pytest.mark.slow
@given(any_graph())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_writes_every_node_of_any_graph_once_under_a_name_of_its_own(graph: fx.Graph) -> None:
    lines = [line for line in graph_text(graph).splitlines() if not line.startswith("# ")]
    assert lines == [node_text(node) for node in graph.nodes]
    names = [name_of(node) for node in graph.nodes]
    assert len({*names}) == len(names)
    defined = [match[1] for line in lines if (match := re.match(r"%(\w+)(?:: [^=]+)? = ", line))]
    assert defined == names[:-1]


@pytest.mark.slow
@given(any_graph())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_writes_a_snapshot_as_the_graph_that_it_was_taken_of(graph: fx.Graph) -> None:
    assert graph_text(Snapshot(graph).graph) == graph_text(graph)


@pytest.mark.parametrize("build", [graphs.two_layers, graphs.two_dtypes, graphs.called_twice])
def test_writes_nothing_of_this_machine_into_a_traced_graph(build: Callable[..., graphs.Traced]) -> None:
    traced = build()
    for record in [*traced.history][2:]:  # before BindMarkers, reads have a "/" between dtypes
        text = str(record)
        assert not re.search(r"0x[0-9a-f]{4,}|/|cpu|primals_|torch", text)
        assert text == graph_text(Snapshot(record.graph).graph)
