"""Every collective of torch's that a graph may launch is known as one: held against what torch registers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
import torch.distributed._symmetric_memory
import torch.distributed.tensor  # with the others: they register their ops
from torch import fx
from torch.distributed._tools import fake_collectives

from fxshard.ir import collectives

NEVER_IN_A_GRAPH = {
    "c10d": "in place, of a ProcessGroup object: Dynamo writes functional ones instead, or breaks the graph",
    "bucketing": "Inductor's own merging of collectives, which fxshard leaves off",
    "c10d_functional": "torch's former names, which trace as what they call",
}
LAUNCH_NOTHING = {"fxshard::keep_rows"}
"""Ops that name a group and send nothing over it."""

WAITS = {"_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors"}


def registered() -> Iterator[tuple[str, set[str]]]:
    """Names of all ops that this torch knows, and of their arguments."""
    for schema in torch._C._jit_get_all_schemas():
        if not schema.overload_name and not schema.name.startswith("prim"):
            yield schema.name, {argument.name for argument in schema.arguments}


def node_of(name: str) -> fx.Node:
    namespace, _, op = name.partition("::")
    return fx.Graph().call_function(getattr(getattr(torch.ops, namespace), op).default)


def test_what_names_a_group_is_a_launch() -> None:
    named = {name for name, arguments in registered() if arguments & {"group_name", "process_group", "ranks"}}
    graphs = {name for name in named - LAUNCH_NOTHING if name.partition("::")[0] not in NEVER_IN_A_GRAPH}
    assert "_dtensor::shard_dim_alltoall" in graphs
    assert [name for name in sorted(graphs) if not collectives.is_launch(node_of(name))] == []


def test_what_torchs_own_tools_count_as_a_collective_is_a_launch_or_a_wait() -> None:
    ops: set[Any] = fake_collectives.functional_collectives
    launched = {op.name() for op in ops} - WAITS
    assert [name for name in sorted(launched) if not collectives.is_launch(node_of(name))] == []


def test_waits_launch_nothing() -> None:
    found = {name for name, _ in registered() if name.startswith("_c10d") and "wait" in name}
    assert found <= WAITS
    for name in found:
        assert collectives.is_wait(node_of(name))
        assert not collectives.is_launch(node_of(name))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("_dtensor::shard_dim_alltoall", True), ("_c10d_functional::all_to_all_single", False), ("aten::relu", False)],
)
def test_dtensors_exchange_waits_itself(name: str, expected: bool) -> None:
    assert collectives.waits_itself(node_of(name)) is expected
