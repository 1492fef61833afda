"""Liveness: against real memory on random graphs, and rule by rule on small ones."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fxshard.ir import ops, tags
from fxshard.ir.liveness import liveness, unsharded_bytes, unsharded_storages, written_in_use
from fxshard.passes.insert_collectives import InsertCollectives
from tests import feeds, graphs
from tests.cost.big import GROUP, WORLD_SIZE, Builder
from tests.nodes import live_bytes

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
LAUNCH, WAIT = c10d.all_gather_into_tensor.default, c10d.wait_tensor.default
F32 = 4  # bytes

OPS = ("relu", "t", "add", "alias", "halves", "add_", "_unsafe_view", "launch", "wait")
Program = list[tuple[str, int, int]]


def built(program: Program, num_inputs: int) -> fx.Graph:
    """A graph over 4 x 4 matrices: op, first and second operand (counted among the values so far)."""
    build = Builder()
    values = [build.input(f"in_{i}", (4, 4)) for i in range(num_inputs)]
    in_flight: list[fx.Node] = []
    for op, first, second in program:
        x, y = values[first % len(values)], values[second % len(values)]
        if op == "launch":
            in_flight.append(build.call(LAUNCH, x, 1, GROUP))
        elif op == "wait":
            if in_flight:
                values.append(build.call(WAIT, in_flight.pop(first % len(in_flight))))
        elif op == "halves":
            halves = build.call(aten.split.Tensor, x, 2)
            half = build.call(operator.getitem, halves, second % 2)
            values.append(build.call(aten.cat.default, [half, half]))
        else:
            values.append(build.call(*call_of(op, x, y)))
    values += [build.call(WAIT, launch) for launch in in_flight]
    return build.finish(values[-1], values[len(values) // 2])


def call_of(op: str, x: fx.Node, y: fx.Node) -> tuple[Any, ...]:
    calls: dict[str, tuple[Any, ...]] = {
        "relu": (aten.relu.default, x),
        "t": (aten.t.default, x),
        "add": (aten.add.Tensor, x, y),
        "alias": (aten.alias.default, x),
        "add_": (aten.add_.Tensor, x, y),
        "_unsafe_view": (aten._unsafe_view.default, x, [4, 4]),
    }
    return calls[op]


def in_real_memory(graph: fx.Graph, *, donated: bool) -> list[int]:
    """Live bytes per node, by running the graph and asking at each node who still needs which real storage."""
    stand_ins: dict[Any, Callable[..., Any]] = {LAUNCH: lambda x, *_: x.clone(), WAIT: lambda x: x}
    nodes, results = list(graph.nodes), {}
    for node in nodes:
        if node.op == "placeholder":
            results[node] = torch.randn(4, 4)
        elif node.op == "call_function":
            function = stand_ins.get(node.target, node.target)
            results[node] = function(*fx.map_arg(node.args, results.__getitem__))
    needed = [needed_at(nodes, i, donated) for i in range(len(nodes))]
    born = {id_: min(i for i, n in enumerate(nodes) if id_ in ids_of(results.get(n))) for id_ in all_ids(results)}
    sizes = {id_: size for value in results.values() for id_, size in ids_of(value).items()}
    inputs = {id_ for n, value in results.items() if n.op == "placeholder" for id_ in ids_of(value)}
    live = []
    for i, readers in enumerate(needed):
        wanted = {id_ for node in readers for id_ in ids_of(results.get(node))}
        started = {id_ for id_ in wanted if id_ in inputs or born[id_] <= i}
        live.append(sum(sizes[id_] for id_ in started))
    return live


def needed_at(nodes: list[fx.Node], i: int, donated: bool) -> set[fx.Node]:
    """Nodes up to `i` whose values some node from `i` on reads or makes, or that are in flight over `i`."""
    needed = {nodes[i]}
    for later in nodes[i:]:
        needed.update(later.all_input_nodes)
        if later.op == "placeholder":
            needed.add(later)
        if later.target is WAIT:
            needed.update(later.all_input_nodes[0].all_input_nodes)
    inputs = {n for n in nodes if n.op == "placeholder"}
    return {n for n in needed if nodes.index(n) <= i or n in inputs} | (set() if donated else inputs)


def ids_of(value: Any) -> dict[int, int]:
    leaves = value if isinstance(value, list | tuple) else [value]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def all_ids(results: dict[fx.Node, Any]) -> set[int]:
    return {id_ for value in results.values() for id_ in ids_of(value)}


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    program=st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=14),
    num_inputs=st.integers(1, 3),
    donated=st.booleans(),
)
def test_live_bytes_are_those_of_the_real_storages(program: Program, num_inputs: int, donated: bool) -> None:
    graph = built(program, num_inputs)
    assert list(live_bytes(graph, donated=donated).values()) == in_real_memory(graph, donated=donated)


def test_a_view_keeps_its_base_alive_and_adds_nothing() -> None:
    build = Builder()
    x = build.input("x", (4, 4))
    y = build.call(aten.relu.default, x)
    view = build.call(aten.t.default, y)
    z = build.call(aten.relu.default, x)
    graph = build.finish(build.call(aten.add.Tensor, z, view))
    matrix = 16 * F32
    assert list(live_bytes(graph).values()) == [matrix, 2 * matrix, 2 * matrix, 3 * matrix, 4 * matrix, 2 * matrix]


def test_a_launch_holds_its_input_and_its_buffer_until_its_wait() -> None:
    build = Builder()
    x = build.input("x", (4,))
    cast = build.call(aten.relu.default, x)
    launch = build.call(LAUNCH, cast, WORLD_SIZE, GROUP)
    other = build.call(aten.relu.default, x)
    graph = build.finish(build.wait(launch), other)
    shard, full = 4 * F32, 4 * WORLD_SIZE * F32
    inputs = shard
    assert list(live_bytes(graph).values()) == [
        inputs,
        inputs + shard,
        inputs + shard + full,
        inputs + shard + full + shard,
        inputs + shard + full + shard,  # the wait
        inputs + full + shard,
    ]


def test_every_input_of_a_coalesced_launch_is_held_until_its_last_wait() -> None:
    build = Builder()
    flats = [build.call(aten.relu.default, build.input(name, (4,))) for name in ("a", "b")]
    launch = build.call(c10d.all_gather_into_tensor_coalesced.default, flats, WORLD_SIZE, GROUP)
    first, second = (build.call(operator.getitem, launch, i) for i in range(2))
    early = build.wait(first)
    late = build.wait(second)
    live = liveness(build.finish(early))
    ends = [live.storages[live.storages_of[node][0]].last_use for node in flats]
    assert ends == [live.nodes.index(late)] * 2


def test_a_launch_without_a_wait_holds_its_memory_to_the_end() -> None:
    build = Builder()
    x = build.input("x", (4,))
    launch = build.gather(x, "unit")
    graph = build.finish(build.call(aten.relu.default, x))
    live = liveness(graph)
    assert live.storages[live.storages_of[launch][0]].last_use == len(graph.nodes) - 1


def test_backward_frees_what_forward_saved_but_not_what_the_caller_owns() -> None:
    gm, _ = graphs.two_layers().at("backward", after=InsertCollectives)
    live = liveness(gm.graph, donated=True)
    ends = {s.maker.name: live.nodes[s.last_use].name for s in live.storages if s.maker.op == "placeholder"}
    assert ends == {"primals_3": "output", "t": "mm_2", "t_2": "mm_4", "tangents_1": "output"}
    kept = liveness(gm.graph)
    assert {live.nodes[s.last_use].name for s in kept.storages if s.maker.op == "placeholder"} == {"output"}


def test_a_view_of_a_parameter_that_a_pass_replaced_is_a_view_of_the_new_one() -> None:
    gm, _ = graphs.two_layers().at("backward", after=InsertCollectives)
    live = liveness(gm.graph)
    by_name = {node.name: node for node in live.nodes}
    (transposed,) = by_name["layers_1_weight"].users
    assert transposed.target is aten.t.default
    assert live.storages_of[transposed] == live.storages_of[by_name["layers_1_weight"]]
    assert not live.allocates(transposed)


def test_unsharded_bytes_are_the_gathered_buffers_and_the_parameters_copied_out_of_them() -> None:
    traced = graphs.two_layers()
    gm, _ = traced.at("forward", after=InsertCollectives)
    (layer,) = {unit.unsharded_bytes for unit in traced.plan.units.values()}
    weight, bias = graphs.WIDTH**2 * F32, graphs.WIDTH * F32
    one_layer = [layer, layer, layer, layer]  # launch, wait, view, slice
    one_layer += [layer + weight] * 3  # its copy, the parameter, the next slice
    one_layer += [layer + weight + bias, weight + bias, weight + bias, bias]  # copy, parameter, mm, add
    assert [used for _, used in unsharded_bytes(gm.graph)] == [0, 0, 0, *one_layer, *one_layer, 0, 0, 0]


def test_what_compute_makes_of_a_parameter_is_not_unsharded_bytes() -> None:
    gm, _ = graphs.casting().at("forward", after=InsertCollectives)
    used = {node.name: size for node, size in unsharded_bytes(gm.graph)}
    names = list(used)
    cast = next(
        n.name for n in gm.graph.nodes if n.target is aten._to_copy.default and n.all_input_nodes[0].name == "weight"
    )
    assert used[cast] == used["weight"] > 0
    assert used[names[names.index(cast) + 1]] == 0


def test_what_a_collective_of_the_model_gathers_is_not_unsharded_bytes() -> None:
    gm, _ = feeds.tensor_parallel(count=1).at("forward", after=InsertCollectives)
    live = liveness(gm.graph)
    gathered = next(node for node in gm.graph.nodes if node.name == "all_gather_into_tensor")
    assert not unsharded_storages(live) & set(live.storages_of[gathered])


def test_markers_count_as_the_parameters_they_stand_for() -> None:
    gm, _ = graphs.trace(graphs.Layer()).at("joint")
    used = {ops.slot_of(node): size for node, size in unsharded_bytes(gm.graph) if ops.is_unshard(node)}
    assert used == {0: graphs.WIDTH**2 * F32, 1: graphs.WIDTH * F32}


def test_the_parameters_of_one_rank_are_its_shards_and_not_counted() -> None:
    gm, _ = graphs.trace(graphs.Layer(), world_size=1).at("forward", after=InsertCollectives)
    assert any(tags.meta_of(node).param for node in gm.graph.nodes)
    assert {used for _, used in unsharded_bytes(gm.graph)} == {0}


def test_symbolic_sizes_count_as_their_hints_and_get_no_guard() -> None:
    build = Builder(dynamic=True)
    x = build.input("x", (24, 4))
    graph = build.finish(build.call(aten.relu.default, x))
    env = build.mode.shape_env
    assert env is not None
    before = (list(env.guards), dict(env.axioms), dict(env.replacements))
    assert list(live_bytes(graph).values()) == [24 * 4 * F32, 2 * 24 * 4 * F32, 2 * 24 * 4 * F32]
    assert (list(env.guards), dict(env.axioms), dict(env.replacements)) == before


def test_an_element_that_is_a_tuple_is_all_of_its_tensors() -> None:
    """As of `run_and_save_rng_state`: a state, and what the op that it runs gives."""
    build = Builder()
    x = build.input("x", (4, 4))
    state, results = build.mode.from_tensor(torch.zeros(8)), [build.mode.from_tensor(torch.zeros(4, 4)) for _ in "ab"]
    saved = build.graph.call_function(torch.ops.higher_order.run_and_save_rng_state, (aten.relu.default, x))
    saved.meta["val"] = (state, tuple(results))
    both = build.graph.call_function(operator.getitem, (saved, 1))
    both.meta["val"] = tuple(results)
    second = build.graph.call_function(operator.getitem, (both, 1))
    second.meta["val"] = results[1]
    graph = build.finish(build.call(aten.relu.default, second))
    live = liveness(graph)
    assert len(live.storages_of[saved]) == 3
    assert live.storages_of[both] == live.storages_of[saved][1:]
    assert live.storages_of[second] == live.storages_of[saved][2:]
    assert not list(written_in_use(graph))
