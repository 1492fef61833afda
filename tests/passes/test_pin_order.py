"""PinOrder: what comes after what, whichever nodes Inductor fuses, and that nothing else is said."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, fx, nn

from fxshard.ir import collectives, launches, meshes, regions, tags
from fxshard.ir.plan import FramePlan
from fxshard.passes import pipeline
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.pin_order import PinOrder
from tests import feeds, graphs
from tests.graphs import SPLIT, Traced, assert_changes_nothing, layers_of, run_pass, trace
from tests.pairwise import pairwise
from tests.schedules import DEAR_COPIES, MODELS, SCHEDULED, assert_schedule, model_of


def pinned(traced: Traced, kind: GraphKind, before: str = "inserted") -> tuple[fx.GraphModule, PassContext]:
    gm, ctx = traced.at(kind, after=InsertCollectives)
    ctx = PassContext(plan=ctx.plan, kind=kind, hardware=DEAR_COPIES)
    for step in (*SCHEDULED[before], PinOrder()):
        run_pass(step, gm, ctx)
    return gm, ctx


def pins(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each pinned node, and the one which it must come after."""
    by_name = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        for name in tags.meta_of(node).after:
            yield node, by_name[name]


def is_collective(node: fx.Node) -> bool:
    """Whether a node launches, waits, or picks a result of a launch."""
    picked = node.target is operator.getitem and collectives.is_launch(node.all_input_nodes[0])
    return collectives.is_launch(node) or collectives.is_wait(node) or picked


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize(
    ("model", "before"),
    [
        ("two_layers", "inserted"),
        ("four_layers", "coalesced"),
        ("four_layers", "merged"),
        ("mixed_precision", "inserted"),
        ("two_dtypes", "inserted"),
        ("called_twice", "inserted"),
        ("root", "inserted"),
    ],
)
def test_pins_what_stands_next_to_kernels(model: str, before: str, kind: GraphKind) -> None:
    gm, _ = pinned(model_of(model), kind, before)
    assert_schedule(gm, f"pin_order_{model}_{before}_{kind}")


in_every_graph = pairwise(model=MODELS, before=SCHEDULED, kind=SPLIT)


@functools.cache
def pins_of(model: str, before: str, kind: GraphKind) -> tuple[fx.Graph, Mapping[fx.Node, fx.Node]]:
    """A graph after the pass, which nobody edits, and each pinned node with the one that it must come after."""
    gm, _ = pinned(model_of(model), kind, before)
    return gm.graph, dict(pins(gm.graph))


@in_every_graph
def test_points_backwards_to_tensors_that_are_not_read_anyway(model: str, before: str, kind: GraphKind) -> None:
    _, after = pins_of(model, before, kind)
    for node, earlier in after.items():
        assert earlier < node
        assert earlier not in node.all_input_nodes
        assert isinstance(earlier.meta["val"], Tensor)


@in_every_graph
def test_pins_collectives_to_kernels_and_kernels_and_waits_to_launches(
    model: str, before: str, kind: GraphKind
) -> None:
    _, after = pins_of(model, before, kind)
    for node, earlier in after.items():
        if is_collective(earlier):
            assert not collectives.is_wait(earlier)
            assert collectives.is_wait(node) or launches.is_kernel(node)
        else:
            assert is_collective(node)
            assert launches.is_kernel(earlier)


@in_every_graph
def test_leaves_no_collective_free_to_pass_the_kernel_before_it(model: str, before: str, kind: GraphKind) -> None:
    """Every launch or wait comes after the last kernel before it, by itself or with the launch before it."""
    graph, after = pins_of(model, before, kind)
    last: set[fx.Node] = set()
    for node in graph.nodes:
        if (collectives.is_launch(node) or collectives.is_wait(node)) and last:
            assert after.get(node) in last or last & set(node.all_input_nodes)
            last |= {node, *node.users} if collectives.is_launch(node) else set()
        elif launches.is_kernel(node):
            last = {node, *node.users}


@in_every_graph
def test_leaves_no_wait_free_to_pass_the_launch_before_it(model: str, before: str, kind: GraphKind) -> None:
    """Between two kernels every wait comes after the last launch: a kernel fused around it could pull it ahead."""
    graph, after = pins_of(model, before, kind)
    launched: set[fx.Node] = set()
    for node in graph.nodes:
        if collectives.is_launch(node):
            launched = {node, *node.users}
        elif launches.is_kernel(node):
            launched = set()
        elif collectives.is_wait(node) and launched:
            assert after.get(node) in launched or launched & set(node.all_input_nodes)


@in_every_graph
def test_leaves_no_kernel_free_to_pass_the_launch_before_it(model: str, before: str, kind: GraphKind) -> None:
    """The first kernel behind a launch comes after it."""
    graph, after = pins_of(model, before, kind)
    results: set[fx.Node] = set()
    for node in graph.nodes:
        if collectives.is_launch(node):
            results = {node, *node.users}
        elif launches.is_kernel(node) and results:
            assert after.get(node) in results or results & set(node.all_input_nodes)
            results = set()


def test_says_nothing_of_a_collective_that_reads_the_kernel() -> None:
    gm, ctx = model_of("two_layers").at("backward", after=InsertCollectives)
    (product, *_) = [node for node in gm.graph.nodes if launches.is_kernel(node)]
    launch, *_ = collectives.reduce_launches(gm.graph)
    run_pass(PinOrder(), gm, ctx)
    assert tags.meta_of(launch).after == (product.name,)
    launch.replace_input_with(launch.all_input_nodes[0], product)
    tags.tag(launch, after=())
    PinOrder().apply(gm, ctx)
    assert not tags.meta_of(launch).after


def test_pins_to_a_tensor_of_a_kernel_that_gives_several() -> None:
    convolutions = graphs.Layers(2, lambda: nn.Conv1d(2, 2, 1))
    gm, _ = pinned(trace(convolutions, units=layers_of), "backward")
    kernels = {earlier.all_input_nodes[0].name for _, earlier in pins(gm.graph) if earlier.target is operator.getitem}
    assert kernels == {node.name for node in gm.graph.nodes if launches.is_kernel(node)}
    assert len(kernels) == 2


def test_pins_to_the_result_of_attention() -> None:
    graph = fx.Graph()
    x, shard = graph.placeholder("x"), graph.placeholder("shard")
    launch = graph.call_function(collectives.ALL_GATHER, (shard, 2, "0"))
    attention = graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention.default, (x, x, x))
    attended, sums = (graph.call_function(operator.getitem, (attention, i)) for i in range(2))
    wait = graph.call_function(collectives.WAIT, (launch,))
    graph.output((attended, sums, wait))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(8, device="meta")
    attention.meta["val"] = (attended.meta["val"], sums.meta["val"])
    ctx = PassContext(plan=FramePlan(units={}, shard_inputs={}), kind="forward")
    assert PinOrder().apply(fx.GraphModule({}, graph), ctx)
    assert list(pins(graph)) == [(attention, launch), (wait, attended)]


def test_pins_to_a_tensor_of_a_launch_that_gives_several() -> None:
    gm, _ = pinned(model_of("four_layers"), "forward", "coalesced")
    gathers = collectives.unshard_launches(gm.graph)
    earlier = {earlier.all_input_nodes[0] for node, earlier in pins(gm.graph) if launches.is_kernel(node)}
    assert earlier == set(gathers[1:])  # what runs behind the first one reads it


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("before", SCHEDULED)
def test_changes_nothing_when_run_again(before: str, kind: GraphKind) -> None:
    gm, ctx = pinned(model_of("root"), kind, before)
    assert_changes_nothing(PinOrder(), gm, ctx)


@pytest.mark.parametrize("kind", SPLIT)
def test_changes_nothing_without_collectives(kind: GraphKind) -> None:
    gm, ctx = graphs.two_layers(world_size=1).at(kind, after=InsertCollectives)
    assert not run_pass(PinOrder(), gm, ctx)


@pytest.mark.parametrize("kind", SPLIT)
def test_changes_nothing_without_kernels(kind: GraphKind) -> None:
    gm, ctx = graphs.scalar().at(kind, after=InsertCollectives)
    assert collectives.unshard_launches(gm.graph) or collectives.reduce_launches(gm.graph)
    assert not run_pass(PinOrder(), gm, ctx)


@pytest.mark.parametrize("kind", SPLIT)
def test_adds_and_moves_no_node(kind: GraphKind) -> None:
    gm, ctx = model_of("root").at(kind, after=InsertCollectives)
    before = [node.format_node() for node in gm.graph.nodes]
    assert run_pass(PinOrder(), gm, ctx)
    assert [node.format_node() for node in gm.graph.nodes] == before


@pytest.mark.parametrize("kind", SPLIT)
def test_runs_last_on_the_graph_that_inductor_makes_code_of(kind: GraphKind) -> None:
    traced = model_of("two_layers", lowering="inductor")
    assert list(traced.history.stages[f"{kind}_last"])[-1] == PinOrder().name
    assert list(pins(traced.history.last(f"{kind}_last").graph))


def test_is_not_there_where_the_graph_runs_as_it_is() -> None:
    assert "forward_last" not in model_of("two_layers", lowering="inductor", train=False).history.stages


class SideBySide(graphs.Layers):
    """Tensor-parallel layers of which none reads what the other gives."""

    def __init__(self) -> None:
        super().__init__(0)
        self.first = nn.Linear(graphs.WIDTH, graphs.WIDTH)
        self.layers = nn.ModuleList(feeds.Feed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, (a, b, c) = self.first(x), self.layers
        return a(x) + b(x) * c(x)


@pytest.mark.skipif(not meshes.ARE_INPUTS, reason="before torch 2.13 functions that Dynamo makes hide the mesh")
@pytest.mark.parametrize("kind", SPLIT)
def test_calls_that_launch_what_is_the_models_own_keep_their_order(kind: GraphKind) -> None:
    traced = trace(
        SideBySide(),
        units=layers_of,
        parallelize=feeds.split,
        inputs=[torch.ones(4, 4)],
        pipeline=pipeline.default(),
        lowering="inductor",
    )
    gm = traced.history.last(f"{kind}_last")
    calls = [node for node in gm.graph.nodes if node.target is regions.INVOKE]
    own = [node for node in gm.graph.nodes if launches.is_models_own(node)]
    assert len(calls) >= 2
    assert set(calls) <= set(own)
    after = {(node, earlier.args[0]) for node, earlier in pins(gm.graph) if earlier.target is operator.getitem}
    after |= {(node, source.args[0]) for node in own for source in node.all_input_nodes if source.args}
    for earlier, node in itertools.pairwise(own):
        assert {earlier, node}.isdisjoint(calls) or (node, earlier) in after or earlier not in calls
    enforced = traced.history.last(f"{kind}_codegen").graph.find_nodes(op="call_function", target=regions.INVOKE)
    pinned_calls = [call for call in calls if tags.meta_of(call).after]
    reading_more = [call for call in enforced if regions.called_by(call).endswith("_after")]
    assert len(reading_more) == len(pinned_calls) > 0
    assert all(
        regions.operands_of(call)[-1].name in tags.meta_of(pinned).after
        for call, pinned in zip(reading_more, pinned_calls, strict=True)
    )
