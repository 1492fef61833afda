"""DeferWeightGradients: what hides the last reduction, what keeps its place, and the same bits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fxshard.hardware import BUILTIN, HardwareSpec
from fxshard.ir import collectives, launch_groups, regions, tags
from fxshard.passes import pipeline
from fxshard.passes._base import GraphPass, PassContext
from fxshard.passes.defer_weight_gradients import DeferWeightGradients
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.pipeline import default
from fxshard.passes.sink_waits import SinkWaits
from tests import feeds
from tests.graphs import Layers, Residual, Traced, assert_changes_nothing, layers_of, run_pass, trace
from tests.pairwise import pairwise
from tests.schedules import BUCKETS, DEAR_COPIES, MODELS, after_passes, assert_schedule, events, model_of
from tests.steps import assert_same_step, step

SLOW_LINK = dataclasses.replace(DEAR_COPIES, kernel_overhead=250e-6, link_latency=0.0, link_bandwidth=64e3)
"""The root's reduction takes a millisecond, as long as four kernels, that of a layer less."""


def deferred(name: str, *before: GraphPass, hardware: HardwareSpec = SLOW_LINK) -> tuple[fx.GraphModule, PassContext]:
    return after_passes(model_of(name), "backward", *before, DeferWeightGradients(), hardware=hardware)


reductions = functools.partial(events, launch="reduce_", wait="reduced_")


def test_computes_what_the_last_reduction_does_not_need_behind_it() -> None:
    gm, ctx = deferred("root")
    assert run_pass(SinkWaits(), gm, ctx)
    assert_schedule(gm, "defer_weight_gradients_root", whole=True)


@pytest.mark.parametrize(("bytes_per_s", "is_hidden"), [(64e3, True), (1e15, False)])
def test_hides_the_all_reduce_that_follows_between_replicas(bytes_per_s: float, is_hidden: bool) -> None:
    hardware = dataclasses.replace(SLOW_LINK, link_bandwidth=1e15, replica_bandwidth=bytes_per_s)
    gm, ctx = model_of("root", replicas=2).at("backward", after=InsertCollectives)
    assert run_pass(DeferWeightGradients(), gm, dataclasses.replace(ctx, hardware=hardware)) == is_hidden


def test_says_how_much_it_hides() -> None:
    _, ctx = deferred("root")
    assert_expected_inline(
        "\n".join(f"{note.node}: {note.why}" for note in ctx.notes),
        """reduce_root: gradients that it does not need are computed behind it: 125 us""",
    )


@pytest.mark.parametrize("model", [model for model in MODELS if model not in ("root", "tied_head")])
def test_changes_nothing_where_the_last_reduction_is_made_of_all(model: str) -> None:
    gm, ctx = model_of(model).at("backward", after=InsertCollectives)
    assert not run_pass(DeferWeightGradients(), gm, ctx)


def test_changes_nothing_without_reductions() -> None:
    gm, ctx = model_of("root").at("forward", after=InsertCollectives)
    assert not run_pass(DeferWeightGradients(), gm, ctx)


class Written(Layers):
    """Writes to a buffer in backward, between the gradients of its weights."""

    def __init__(self) -> None:
        super().__init__(2)
        self.first = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.first)


def test_moves_nothing_across_a_write() -> None:
    gm, ctx = trace(Written(), units=layers_of, reshard_after_forward=True).at("backward", after=InsertCollectives)
    ctx = dataclasses.replace(ctx, hardware=SLOW_LINK)
    last = launch_groups.groups_of(gm.graph, collectives.REDUCTIONS)[-1].launches[-1]
    weights = [node for node in gm.graph.nodes if tags.meta_of(node).grads and node < last]
    with gm.graph.inserting_before(last):
        gm.graph.call_function(torch.ops.aten.copy_.default, (weights[0], weights[0])).meta["val"] = weights[0].meta[
            "val"
        ]
    before = list(gm.graph.nodes)
    DeferWeightGradients().apply(gm, ctx)
    assert list(gm.graph.nodes) == before


def tensor_parallel(first: nn.Module) -> Traced:
    model = feeds.FeedsBehind(first, 2)
    inline = pipeline.default(regions="off")
    return trace(model, units=layers_of, parallelize=feeds.split, inputs=[torch.ones(4, 4)], pipeline=inline)


def of_the_model(gm: fx.GraphModule) -> list[str]:
    """Collectives that no pass has inserted."""
    return [n.name for n in gm.graph.nodes if collectives.is_launch(n) and not tags.units_of(n)]


def test_takes_the_reductions_of_the_model_for_no_gradients() -> None:
    gm, ctx = tensor_parallel(nn.Linear(4, 4)).at("forward", after=InsertCollectives)
    assert any("reduce_scatter" in name for name in of_the_model(gm))
    assert not run_pass(DeferWeightGradients(), gm, ctx)


def test_collectives_of_the_model_go_behind_the_last_reduction() -> None:
    """The gradient of a norm's weight is reduced over the ranks of tensor parallelism first."""
    gm, ctx = tensor_parallel(nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 4))).at(
        "backward", after=InsertCollectives
    )
    before = of_the_model(gm)
    assert run_pass(DeferWeightGradients(), gm, dataclasses.replace(ctx, hardware=SLOW_LINK))
    names = [node.name for node in gm.graph.nodes]
    assert of_the_model(gm) == before
    assert names.index(before[-1]) > names.index("reduce_root")


def test_collectives_of_the_model_keep_their_order() -> None:
    gm, ctx = tensor_parallel(feeds.Feed()).at("backward", after=InsertCollectives)
    before = of_the_model(gm)
    run_pass(DeferWeightGradients(), gm, dataclasses.replace(ctx, hardware=SLOW_LINK))
    assert of_the_model(gm) == before


def test_random_numbers_are_drawn_in_the_same_order() -> None:
    gm, ctx = model_of("root").at("backward", after=InsertCollectives)
    ctx = dataclasses.replace(ctx, hardware=SLOW_LINK)
    kernels = [node for node in gm.graph.nodes if node.target is torch.ops.aten.mm.default]
    drawn = []
    for kernel in kernels:
        with gm.graph.inserting_after(kernel):
            drawn.append(gm.graph.call_function(torch.ops.aten.rand_like.default, (kernel,)))
            drawn[-1].meta["val"] = kernel.meta["val"]
    DeferWeightGradients().apply(gm, ctx)
    assert sorted(drawn) == drawn  # nodes compare by their place in the graph


def test_changes_nothing_where_the_link_takes_no_time() -> None:
    fast = dataclasses.replace(BUILTIN["cpu"], link_latency=0.0, link_bandwidth=1e18)
    before, _ = after_passes(model_of("root"), "backward")
    assert reductions(deferred("root", hardware=fast)[0]) == reductions(before)


@pytest.mark.parametrize("before", BUCKETS)
@pytest.mark.parametrize("model", MODELS)
def test_changes_nothing_when_run_again(model: str, before: str) -> None:
    gm, ctx = deferred(model, *BUCKETS[before])
    assert_changes_nothing(DeferWeightGradients(), gm, ctx)


@pairwise(model=MODELS, before=BUCKETS, hardware=["cpu", "h100"])
def test_computes_the_same_bits(model: str, before: str, hardware: str) -> None:
    traced = model_of(model)
    rewritten = step(traced, *BUCKETS[before], DeferWeightGradients(), SinkWaits(), hardware=BUILTIN[hardware])
    assert_same_step(rewritten, step(traced), rtol=0, atol=0)


class Embedded(Layers):
    """A matrix of the root's, and three residual layers, which are alike."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Residual() for _ in range(3))
        self.first = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.first)


@pytest.mark.parametrize(("prefetch", "called"), [(1, 3), ("auto", 2)])
def test_takes_the_block_apart_that_a_backward_ends_with(prefetch: Any, called: int) -> None:
    """Blocks are called as regions, but for the one whose gradients may hide the embedding's reduction."""
    traced = trace(Embedded(), units=layers_of, reshard_after_forward=True, pipeline=default(prefetch=prefetch))
    results = traced.history.stages["backward"]
    graph = results["call_regions"].graph
    assert len(graph.find_nodes(op="call_function", target=regions.INVOKE)) == called
    forward = traced.history.stages["forward"]["call_regions"].graph
    assert len(forward.find_nodes(op="call_function", target=regions.INVOKE)) == 3
