"""Statistics of whole graphs: exact on small ones, symbolic on dynamic ones, linear on long ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import fx

from fxshard.cost.stats import CollectiveCost, GraphStats, collectives_of, graph_stats
from fxshard.cost.symbols import WORLD_SIZE
from fxshard.errors import ConfigError
from fxshard.hardware import HardwareSpec, load
from fxshard.ir import liveness
from fxshard.ir.plan import FramePlan
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.tools.demo.gpt import GPT
from tests import graphs, nodes
from tests.cost import big

HARDWARE = HardwareSpec(
    name="test",
    peak_flops={"f32": 64.0},
    memory_bandwidth=1024.0,
    link_latency=2.0,
    link_bandwidth=8.0,
    memory_gib=1,
    kernel_overhead=0.25,
    gather_tensor_overhead=0.0,
    reduce_tensor_overhead=0.0,
)
LAYER = (graphs.WIDTH**2 + graphs.WIDTH) * 4  # bytes of a gathered unit
X = 2 * graphs.WIDTH * 4  # bytes of an activation
SHARDS = LAYER  # bytes of this rank's halves of two units


def stats_of(kind: Any, traced: graphs.Traced | None = None) -> GraphStats:
    gm, ctx = (traced or graphs.two_layers()).at(kind, after=InsertCollectives)
    return graph_stats(gm.graph, ctx.plan, HARDWARE, donated=kind == "backward")


def test_forward_of_two_layers() -> None:
    transfer = 2.0 + LAYER / 2 / 8
    product = max(2 * 2 * 4 * 4 / 64, (X + 64 + X) / 1024)
    layer = [64 * 2 / 1024, 16 * 2 / 1024, product, (X + 16 + X) / 1024]  # two copies out, mm, add
    compute = 2 * (sum(layer) + 0.25 * len(layer))
    stats = stats_of("forward").evaluate()
    assert stats.exposed_seconds == pytest.approx(2 * transfer)
    assert stats.compute_seconds == pytest.approx(compute)
    assert (stats.collectives, stats.num_nodes) == ({"all_gather": 2}, 28)
    assert (stats.gathered_bytes, stats.reduced_bytes, stats.flops) == (2 * LAYER, 0, 2 * 2 * 2 * 4 * 4)
    # At the second layer's last copy out: both shards, x, the first layer's result, the buffer and both parameters.
    assert stats.peak_bytes == SHARDS + X + X + 2 * LAYER
    assert stats.unsharded_peak_bytes == 2 * LAYER


def test_backward_of_two_layers() -> None:
    stats = stats_of("backward").evaluate()
    transfer = 2.0 + LAYER / 2 / 8
    assert stats.collectives == {"all_gather": 1, "reduce_scatter": 2}
    assert (stats.gathered_bytes, stats.reduced_bytes) == (LAYER, 2 * LAYER)
    assert stats.flops == 3 * 2 * 2 * 4 * 4
    assert stats.comm_seconds == pytest.approx(3 * transfer)
    assert stats.exposed_seconds == pytest.approx(3 * transfer)
    assert stats.unsharded_peak_bytes == LAYER + graphs.WIDTH**2 * 4
    # At the copy out of the matrix: shard, one saved activation (the other is freed), incoming gradient, reduced shard.
    assert stats.peak_bytes == LAYER / 2 + 2 * X + LAYER / 2 + LAYER + graphs.WIDTH**2 * 4


def test_an_all_reduce_over_replicas_moves_the_shard_twice_on_a_queue_of_its_own() -> None:
    stats = stats_of("backward", graphs.two_layers(replicas=4))
    at = stats.evaluate()
    transfer, all_reduce = 2.0 + LAYER / 2 / 8, 2.0 + 2 * 3 / 4 * LAYER / 2 / 8
    assert at.collectives == {"all_gather": 1, "reduce_scatter": 2, "all_reduce": 2}
    assert at.comm_seconds == pytest.approx(3 * transfer + 2 * all_reduce)
    assert at.reduced_bytes == 2 * LAYER
    of_four = 3 * (2.0 + LAYER * 3 / 4 / 8) + 2 * (2.0 + 2 * 3 / 4 * LAYER / 4 / 8)
    assert stats.evaluate(4).comm_seconds == pytest.approx(of_four)


def test_markers_cost_no_communication() -> None:
    gm, ctx = graphs.two_layers().at("joint")
    stats = graph_stats(gm.graph, ctx.plan, HARDWARE)
    assert (stats.collectives, stats.comm_seconds, stats.exposed_seconds, stats.gathered_bytes) == ({}, 0, 0, 0)
    assert stats.flops == 5 * 2 * 2 * 4 * 4


def test_a_graph_that_was_not_traced_on_fake_tensors_has_nodes_and_no_costs() -> None:
    graph = fx.symbolic_trace(graphs.Layer()).graph
    stats = graph_stats(graph, FramePlan(units={}, shard_inputs={}), HARDWARE)
    assert stats == stats.evaluate()
    assert (stats.num_nodes, stats.flops, stats.peak_bytes, stats.compute_seconds) == (6, 0, 0, 0)


def test_the_line_is_in_human_units() -> None:
    assert str(stats_of("forward")) == (
        "28 nodes, 2 all_gather, gathered 0.000153 MiB, reduced 0 MiB, 1.28e-07 GFLOP, compute 4,469 ms, "
        "comm 14,000 ms, exposed 14,000 ms, peak 0.00029 MiB, unsharded 0.000153 MiB"
    )


def test_another_world_size_changes_bytes_and_seconds_but_not_flops() -> None:
    stats = stats_of("forward", graphs.uneven())
    assert stats.symbols == ("world_size",)
    two, three, five = (stats.evaluate(n) for n in (2, 3, 5))
    # Five rows of five and a vector of five: padded to six rows for two and three ranks.
    assert [s.gathered_bytes for s in (two, three, five)] == [6 * 6 * 4, 6 * 6 * 4, 5 * 6 * 4]
    assert [s.comm_seconds for s in (two, three, five)] == [2 + 144 / 2 / 8, 2 + 144 * 2 / 3 / 8, 2 + 120 * 4 / 5 / 8]
    assert two.flops == three.flops == 2 * 2 * 5 * 5
    assert (two.world_size, five.world_size) == (2, 5)
    assert stats.evaluate() == two


def test_a_row_per_launch_names_its_unit() -> None:
    gm, ctx = graphs.two_layers().at("backward", after=InsertCollectives)
    rows = collectives_of(gm.graph, ctx.plan, HARDWARE)
    transfer = 2.0 + LAYER / 2 / 8
    assert [(row.node, row.unit, row.op, row.dtype) for row in rows] == [
        ("reduce_layers_1", "layers.1", "reduce_scatter", "f32"),
        ("unshard_layers_1", "layers.1", "all_gather", "f32"),
        ("reduce_layers_0", "layers.0", "reduce_scatter", "f32"),
    ]
    assert [row.nbytes.subs(WORLD_SIZE, 2) for row in rows] == [LAYER] * 3
    assert [row.exposed_seconds for row in rows] == pytest.approx([transfer] * 3)
    assert starts_in_order(rows)


def starts_in_order(rows: Sequence[CollectiveCost]) -> bool:
    return all(a.start < b.start for a, b in itertools.pairwise(rows))


# ---- dynamic shapes


def dynamic_forward() -> tuple[fx.Graph, FramePlan]:
    """Forward of a layer whose batch is a symbol."""
    x = torch.ones(6, graphs.WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    gm, ctx = graphs.trace(graphs.Layer(), inputs=[x]).at("forward", after=InsertCollectives)
    return gm.graph, ctx.plan


def shape_env(graph: fx.Graph) -> Any:
    return next(
        node.meta["val"].fake_mode.shape_env for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)
    )


def knowledge(env: Any) -> tuple[Any, ...]:
    """All that a shape environment was told."""
    known = (env.guards, env.axioms, env.replacements, env.divisible, env.deferred_runtime_asserts, env.var_to_range)
    return tuple(map(repr, known))


def test_a_dynamic_graph_gives_expressions_in_its_symbol_and_the_world_size() -> None:
    graph, plan = dynamic_forward()
    stats = graph_stats(graph, plan, HARDWARE)
    (batch,) = set(stats.symbols) - {"world_size"}
    assert stats.hints[batch] == 6
    assert str(stats.flops) == f"{2 * graphs.WIDTH**2}*{batch}"
    assert {symbol.name for symbol in stats.peak_bytes.free_symbols} == {batch, "world_size"}
    assert stats.evaluate().flops == 2 * 6 * 4 * 4
    assert stats.evaluate(**{batch: 10}).flops == 2 * 10 * 4 * 4
    assert stats.evaluate(world_size=4, **{batch: 10}).gathered_bytes == LAYER


def test_costing_a_dynamic_graph_tells_its_shape_environment_nothing() -> None:
    graph, plan = dynamic_forward()
    before = knowledge(shape_env(graph))
    str(graph_stats(graph, plan, HARDWARE))
    assert len(collectives_of(graph, plan, HARDWARE)) == 1
    assert knowledge(shape_env(graph)) == before


def test_a_symbol_that_the_graph_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="the graph has no symbol batch; it has none"):
        stats_of("forward").evaluate(batch=3)


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_the_flops_of_a_transformer_are_those_of_the_textbook_in_both_dialects(
    lowering: Literal["eager", "inductor"],
) -> None:
    batch, seq, dim, layers = 2, 32, 64, 2
    tokens = torch.randint(0, 256, (batch, seq))
    traced = graphs.trace(GPT(seq, dim=dim, num_layers=layers), inputs=[tokens], lowering=lowering)
    weights = layers * 12 * dim**2 + dim * 256
    products = layers * batch * seq**2 * dim  # multiply-adds of queries with keys, and of scores with values
    assert stats_of("forward", traced).flops == 2 * (batch * seq * weights + 2 * products)
    assert stats_of("backward", traced).flops == 2 * (2 * batch * seq * weights + 5 * products)


# ---- long graphs


def test_the_numbers_of_a_long_graph_are_those_of_a_layer_times_the_layers() -> None:
    one, ten = (graph_stats(*big.graph(layers), HARDWARE).evaluate() for layers in (1, 10))
    assert ten.collectives == {"all_gather": 10}
    assert (ten.flops, ten.gathered_bytes) == (10 * one.flops, 10 * one.gathered_bytes)
    assert ten.comm_seconds == pytest.approx(10 * one.comm_seconds)
    assert ten.compute_seconds == pytest.approx(10 * one.compute_seconds)
    assert ten.unsharded_peak_bytes == one.unsharded_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_of_four_times_the_nodes_takes_less_than_twelve_times_as_long(dynamic: bool) -> None:
    short, long = big.graph(8, dynamic=dynamic), big.graph(32, dynamic=dynamic)
    hardware = load("h100")
    for run in (
        lambda graph, plan: graph_stats(graph, plan, hardware),
        lambda graph, plan: nodes.live_bytes(graph),
        lambda graph, plan: liveness.unsharded_bytes(graph),
    ):
        assert shortest(run, *long) < 12 * shortest(run, *short)


def shortest(run: Callable[..., Any], *args: Any) -> float:
    """The least of several times: what the machine did besides is not the subject."""
    times = []
    for _ in range(3):
        start = time.process_time()
        run(*args)
        times.append(time.process_time() - start)
    return min(times)


def test_refuses_a_world_size_below_one() -> None:
    gm, ctx = graphs.two_layers().at("forward", after=InsertCollectives)
    with pytest.raises(ConfigError, match="world_size must be a positive int, got 0"):
        graph_stats(gm.graph, ctx.plan, load("h100")).evaluate(world_size=0)
