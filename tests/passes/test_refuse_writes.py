"""A graph that writes into a parameter is refused first of all; `tests/ir/test_writes.py` has the ways to write."""

from __future__ import annotations

import pytest
from torch import fx

from fxshard.errors import UnsupportedGraph
from fxshard.ir import reads
from fxshard.passes.refuse_writes import RefuseWrites
from tests import graphs


def write_into(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        node.graph.call_method("mul_", (node, 2.0)).meta["example_value"] = node.meta["example_value"]


def test_refuses_a_write_into_a_parameter_and_no_other() -> None:
    gm, ctx = graphs.two_layers().at("dynamo")
    write_into(gm.graph.output_node().all_input_nodes[0])
    graphs.assert_changes_nothing(RefuseWrites(), gm, ctx)
    write_into(next(iter(reads.reads_of(gm, ctx.plan))))
    with pytest.raises(UnsupportedGraph, match=r"in place during forward: layers.0.weight \(aten.mul_"):
        graphs.run_pass(RefuseWrites(), gm, ctx)
