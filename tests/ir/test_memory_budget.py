"""Memory budget: what a budget of unsharded bytes leaves at each node, and what is reserved."""

from __future__ import annotations

import pytest
from torch import fx

from fxshard.ir import liveness
from fxshard.ir.memory_budget import GIB, MemoryBudget
from fxshard.passes.insert_collectives import InsertCollectives
from tests.schedules import model_of

UNIT = 80
"""Bytes of a gathered layer; while it is copied out, it is there twice."""


@pytest.fixture
def graph() -> fx.Graph:
    return model_of("four_layers").at("forward", after=InsertCollectives)[0].graph


def named(graph: fx.Graph, name: str) -> fx.Node:
    nodes: dict[str, fx.Node] = {node.name: node for node in graph.nodes}
    return nodes[name]


def test_knows_what_is_used_at_each_node(graph: fx.Graph) -> None:
    memory = MemoryBudget(graph, 0)
    assert memory.used == [nbytes for _, nbytes in liveness.unsharded_bytes(graph)]
    assert max(memory.used) == 2 * UNIT
    assert memory.used[memory.places[named(graph, "mm")]] == UNIT


def test_fits_anything_without_a_budget(graph: fx.Graph) -> None:
    memory = MemoryBudget(graph, None)
    first, last = named(graph, "unshard_layers_0"), named(graph, "unshard_layers_3")
    assert memory.fits(first, last, 1 << 60)
    assert memory.earliest(first, last, 1 << 60) is first
    memory.reserve(first, last, 1 << 60)
    assert memory.fits(first, last, 1 << 60)


@pytest.mark.parametrize(("budget", "fits"), [(3 * UNIT, True), (3 * UNIT - 1, False)])
def test_compares_the_fullest_node_of_a_span_with_the_budget(graph: fx.Graph, budget: int, fits: bool) -> None:
    memory = MemoryBudget(graph, budget)
    first, last = named(graph, "unshard_layers_0"), named(graph, "unshard_layers_1")
    assert memory.fits(first, last, UNIT) == fits


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (3 * UNIT, "unshard_layers_0"),  # all the way
        (3 * UNIT - 1, "layers_0_bias"),  # where the first layer has been copied out
        (2 * UNIT, "layers_0_bias"),
        (2 * UNIT - 1, "add"),  # where its matrix has been read
        (UNIT + 15, "unshard_layers_1"),  # not at all: its vector has 16 bytes
    ],
)
def test_goes_up_as_far_as_the_budget_allows(graph: fx.Graph, budget: int, expected: str) -> None:
    memory = MemoryBudget(graph, budget)
    wanted, now = named(graph, "unshard_layers_0"), named(graph, "unshard_layers_1")
    assert memory.earliest(wanted, now, UNIT).name == expected


def test_says_what_was_too_much(graph: fx.Graph) -> None:
    memory = MemoryBudget(graph, 2 * UNIT)
    free = memory.earliest(named(graph, "unshard_layers_0"), named(graph, "unshard_layers_1"), UNIT)
    assert memory.full_before(free, UNIT) == f"memory budget: {3 * UNIT / GIB:.3g} of {2 * UNIT / GIB:.3g} GiB"


def test_counts_what_was_reserved_before(graph: fx.Graph) -> None:
    memory = MemoryBudget(graph, 3 * UNIT)
    first, second, third = (named(graph, f"unshard_layers_{i}") for i in range(3))
    assert memory.earliest(first, second, UNIT) is first
    memory.reserve(first, second, UNIT)
    assert memory.earliest(first, second, UNIT).name == "layers_0_bias"
    assert not memory.fits(first, second, UNIT)
    assert memory.fits(second, third, UNIT)  # behind it nothing was reserved


def test_counts_in_the_graph_as_it_was(graph: fx.Graph) -> None:
    memory = MemoryBudget(graph, 3 * UNIT)
    before = list(memory.used)
    named(graph, "unshard_layers_0").prepend(named(graph, "unshard_layers_1"))
    assert memory.used == before
    assert [node.name for node in memory.nodes] != [node.name for node in graph.nodes]
