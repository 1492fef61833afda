"""Launch groups: which launches stand together, what is moved with them, and where it may go."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx

from fxshard.ir import collectives, launch_groups, tags
from fxshard.ir.launch_groups import Hoist
from fxshard.ir.memory_budget import MemoryBudget
from fxshard.passes._base import GraphKind, GraphPass
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.insert_collectives import InsertCollectives
from tests import graphs
from tests.graphs import SPLIT, Traced
from tests.pairwise import pairwise
from tests.schedules import BUCKETS, DEAR_COPIES, MODELS, mixed_layers, model_of

TARGETS = (collectives.GATHERS, collectives.REDUCTIONS)


def graph_of(traced: Traced, kind: GraphKind, *before: GraphPass) -> fx.Graph:
    gm, ctx = traced.at(kind, after=InsertCollectives)
    for step in before:
        step.apply(gm, dataclasses.replace(ctx, hardware=DEAR_COPIES))
    return gm.graph


def names(nodes: list[fx.Node]) -> str:
    return " ".join(node.name for node in nodes)


def test_finds_a_group_for_each_unit() -> None:
    found = launch_groups.groups_of(graph_of(model_of("four_layers"), "forward"), collectives.GATHERS)
    assert [group.name for group in found] == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert [names(group.nodes) for group in found] == [f"unshard_layers_{i}" for i in range(4)]
    assert [names(group.waits) for group in found] == [f"wait_layers_{i}" for i in range(4)]


def test_finds_the_launches_of_two_dtypes_in_one_group() -> None:
    found = launch_groups.groups_of(graph_of(model_of("two_dtypes"), "forward"), collectives.GATHERS)
    assert [names(group.launches) for group in found] == [f"unshard_layers_{i} unshard_layers_{i}_1" for i in range(3)]
    assert [len(group.waits) for group in found] == [2, 2, 2]


def test_finds_two_groups_where_two_units_are_launched_side_by_side() -> None:
    graph = graph_of(model_of("four_layers"), "forward", HoistPrefetch(depth=1))
    found = launch_groups.groups_of(graph, collectives.GATHERS)
    assert [group.name for group in found] == ["layers.0", "layers.1", "layers.2", "layers.3"]


def test_tells_the_calls_of_a_unit_apart() -> None:
    found = launch_groups.groups_of(graph_of(model_of("called_twice"), "forward"), collectives.GATHERS)
    assert [group.units for group in found] == [
        {"layers.0": "0"},
        {"layers.1": "0"},
        {"layers.0": "1"},
        {"layers.1": "1"},
    ]


def test_names_all_units_of_a_bucket() -> None:
    graph = graph_of(model_of("four_layers"), "forward", *BUCKETS["merged"])
    found = launch_groups.groups_of(graph, collectives.GATHERS)
    assert [group.name for group in found] == ["layers.0, layers.1", "layers.2, layers.3"]


def test_names_the_root() -> None:
    first, *_ = launch_groups.groups_of(graph_of(model_of("root"), "forward"), collectives.GATHERS)
    assert first.name == "root"


def test_moves_casts_and_slices_and_what_picks_results_along() -> None:
    graph = graph_of(mixed_layers(), "forward", CoalesceCollectives())
    first, *_ = launch_groups.groups_of(graph, collectives.GATHERS)
    assert [node.target for node in first.nodes[:3]] == [
        torch.ops.aten._to_copy.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.slice.Tensor,
    ]
    assert first.nodes[3] is first.launches[0]
    assert first.nodes[4:] == sorted(first.launches[0].users)


def test_leaves_what_others_read_where_it_is() -> None:
    graph = graph_of(mixed_layers(), "forward")
    first, *_ = launch_groups.groups_of(graph, collectives.GATHERS)
    cast = first.launches[0].all_input_nodes[0]
    assert cast in first.nodes
    with graph.inserting_after(cast):
        graph.call_function(torch.ops.aten.neg.default, (cast,))
    first, *_ = launch_groups.groups_of(graph, collectives.GATHERS)
    assert cast not in first.nodes


def test_finds_no_group_of_the_users_own_collectives() -> None:
    graph = graph_of(graphs.two_layers(), "forward")
    launch, _ = collectives.unshard_launches(graph)
    launch.meta[tags.KEY] = tags.NodeMeta()
    assert [group.name for group in launch_groups.groups_of(graph, collectives.GATHERS)] == ["layers.1"]


@pairwise(model=MODELS, before=BUCKETS, kind=SPLIT)
def test_moves_nothing_along_that_compute_needs(model: str, before: str, kind: GraphKind) -> None:
    """Each launch and wait is in one group; a group has what leads to its launches and picks from them."""
    graph = graph_of(model_of(model), kind, *BUCKETS[before])
    found = [group for targets in TARGETS for group in launch_groups.groups_of(graph, targets)]
    launches = [launch for group in found for launch in group.launches]
    assert sorted(launches) == sorted([*collectives.unshard_launches(graph), *collectives.reduce_launches(graph)])
    waits = sorted(wait for group in found for wait in group.waits)
    assert waits == list(graph.find_nodes(op="call_function", target=collectives.WAIT))
    for group in found:
        assert group.nodes == sorted(group.nodes)
        for node in group.nodes:
            assert tags.meta_of(node).grads == ()
            assert tags.meta_of(node).param == ""
            assert (
                node in group.launches
                or set(node.all_input_nodes) & set(group.launches)
                or all(user in group.nodes for user in node.users)
            )


# ---- places


def test_knows_the_last_input() -> None:
    graph = graph_of(model_of("four_layers"), "backward")
    assert launch_groups.last_input(graph).name == "tangents_1"


@pytest.mark.parametrize(
    ("moving", "expected"),
    [
        ([], "unshard_layers_0"),  # behind all inputs
        (["unshard_layers_0"], "wait_layers_0"),
        (["unshard_layers_0", "wait_layers_0"], "view"),
    ],
)
def test_finds_the_place_behind_an_input(moving: list[str], expected: str) -> None:
    graph = graph_of(graphs.two_layers(), "forward")
    nodes = {node.name: node for node in graph.nodes}
    first_input = next(iter(graph.nodes))
    assert launch_groups.following(first_input, [nodes[name] for name in moving]).name == expected


def test_moves_nodes_in_the_order_given() -> None:
    graph = graph_of(graphs.two_layers(), "forward")
    nodes = {node.name: node for node in graph.nodes}
    place = nodes["unshard_layers_0"]
    launch_groups.move({nodes["unshard_layers_1"]: place, nodes["wait_layers_1"]: place})
    order = [node.name for node in graph.nodes if node.op == "call_function"]
    assert order[:3] == ["unshard_layers_1", "wait_layers_1", "unshard_layers_0"]
    graph.lint()


def hoist_of(graph: fx.Graph, budget: int | None = None) -> tuple[Hoist, list[launch_groups.LaunchGroup], fx.Node]:
    """A hoist of all gathers, these, and the earliest place in the graph."""
    groups = launch_groups.groups_of(graph, collectives.GATHERS)
    hoist = Hoist(groups, MemoryBudget(graph, budget))
    return hoist, groups, hoist.following(launch_groups.last_input(graph))


def test_hoists_groups_to_one_place_in_the_order_in_which_they_are_launched() -> None:
    graph = graph_of(model_of("four_layers"), "forward")
    hoist, groups, start = hoist_of(graph)
    for group in (groups[2], groups[1]):
        assert hoist.earliest(group, start) == (start, [])
        hoist.launch(group, start)
    hoist.move()
    assert names(collectives.unshard_launches(graph)).startswith("unshard_layers_0 unshard_layers_2 unshard_layers_1")
    assert start.name == "wait_layers_0"
    assert start.prev is groups[1].launches[0]


def test_hoists_no_group_down() -> None:
    graph = graph_of(model_of("four_layers"), "forward")
    before = list(graph.nodes)
    hoist, groups, _ = hoist_of(graph)
    hoist.launch(groups[0], groups[1].waits[0])
    hoist.move()
    assert list(graph.nodes) == before


def test_hoists_no_further_than_the_budget_and_says_so() -> None:
    hoist, groups, start = hoist_of(graph_of(model_of("four_layers"), "forward"), budget=200)
    place, (why,) = hoist.earliest(groups[1], start)
    assert start < place < groups[1].launches[0]
    assert why.startswith("memory budget: ")
    used, position = hoist.budget.used, hoist.budget.places[place]
    before = used[position]
    hoist.launch(groups[1], place)
    assert used[position] == before + launch_groups.launched_bytes(groups[1].launches[0]) <= 200
