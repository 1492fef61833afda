"""The schedule of a graph as text: what is shown of it, and how."""

from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline
from torch import fx

from fxshard.ir import collectives, ops, tags
from fxshard.ir.schedule import schedule_text

aten = torch.ops.aten


def test_shows_launches_waits_and_kernels_in_order_and_what_they_wait_for() -> None:
    graph = fx.Graph()
    shard, x = graph.placeholder("shard"), graph.placeholder("x")
    cast = graph.call_function(aten._to_copy.default, (shard,), {"dtype": torch.bfloat16})
    part = graph.call_function(aten.slice.Tensor, (cast, 0, 0, 8))
    for node in (cast, part):
        tags.tag(node, stream=tags.COPY_IN)
    own = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    arguments = (shard, torch.float32, [0], [8], 2, "0", "first", True, "")
    launch = graph.create_node("call_function", ops.PREFETCHED_ALL_GATHER, arguments, name="unshard")
    gathered = graph.call_function(operator.getitem, (launch, 0))
    wait = graph.call_function(collectives.WAIT, (own,))
    tags.tag(wait, control_deps=("unshard",))
    scaled = graph.call_function(aten.mul.Tensor, (wait, 2))
    product = graph.call_function(aten.mm.default, (scaled, gathered))
    tags.tag(product, after=(gathered.name, wait.name))
    graph.output((product, scaled, own))
    assert_expected_inline(
        schedule_text(graph),
        """\
_to_copy_default  # stream=copy_in
all_reduce_default
unshard = prefetched_all_gather  # role=first
wait_tensor_default  # control_deps=unshard
mm_default  # after=unshard,wait_tensor_default
return mm_default, all_reduce_default""",
    )


def test_of_a_graph_without_any_says_that_it_returns() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    assert schedule_text(graph) == "return"
