"""CoalesceCollectives: the whole graph where copies are dear and where tensors are, and the same bits for all ranks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

from fxshard.hardware import BUILTIN, HardwareSpec
from fxshard.ir import collectives, launches, regions, signature, tags
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.insert_collectives import InsertCollectives
from tests import graphs
from tests.graphs import Traced, assert_changes_nothing, assert_golden, run_pass, text
from tests.pairwise import each_once
from tests.schedules import DEAR_COPIES, DEAR_KERNELS, DEAR_TENSORS
from tests.steps import assert_same_step, reference_step, step

MATRICES = dataclasses.replace(
    BUILTIN["cpu"],
    kernel_overhead=0.0,
    memory_bandwidth=64.0,  # a second for a matrix of 4 x 4 floats, read and written
    gather_tensor_overhead=1.0,
    reduce_tensor_overhead=1.0,
)
"""Worth a tensor: a matrix, but not a vector."""


def coalesced(
    traced: Traced, kind: GraphKind, hardware: HardwareSpec, **fields: bool
) -> tuple[fx.GraphModule, PassContext]:
    gm, ctx = traced.at(kind, after=InsertCollectives)
    ctx = dataclasses.replace(ctx, hardware=hardware)
    run_pass(CoalesceCollectives(**fields), gm, ctx)
    return gm, ctx


def test_copies_no_parameter_out_where_tensors_are_cheap() -> None:
    gm, _ = coalesced(graphs.two_layers(), "forward", DEAR_COPIES)
    assert_golden(text(gm), "coalesce_collectives_forward")


def test_copies_no_gradient_in_where_tensors_are_cheap() -> None:
    gm, _ = coalesced(graphs.two_layers(), "backward", DEAR_COPIES)
    numbered = re.sub(r"%view_\d+", "%view_n", text(gm))  # torch counts its views differently from release to release
    assert_golden(numbered, "coalesce_collectives_backward")


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_leaves_one_tensor_per_launch_where_tensors_are_dear(kind: GraphKind) -> None:
    traced = graphs.two_layers()
    before, _ = traced.at(kind, after=InsertCollectives)
    gm, ctx = coalesced(traced, kind, DEAR_TENSORS)
    assert text(gm) == text(before)
    assert not ctx.history.last(kind).changed


def test_copies_the_small_neighbours_of_a_large_parameter_together() -> None:
    gm, _ = coalesced(graphs.trace(graphs.Norms()), "forward", MATRICES)
    assert_golden(text(gm), "coalesce_collectives_neighbours")


@pytest.mark.parametrize(("fuses_copies", "numels"), [(True, [8, 32, 8, 8]), (False, [4, 4, 32, 8, 8])])
def test_gathers_what_generated_kernels_read_together_where_they_may_copy(
    fuses_copies: bool, numels: list[int]
) -> None:
    gm, _ = coalesced(graphs.trace(graphs.Norms()), "forward", DEAR_KERNELS, fuses_copies=fuses_copies)
    (launch,) = collectives.unshard_launches(gm.graph)
    assert [result.numel() for result in launch.meta["val"]] == numels  # of the last two, backward has the first


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_looks_into_a_region_for_who_reads(kind: GraphKind) -> None:
    gm, ctx = graphs.regions().at(kind, after=InsertCollectives)
    assert any(map(regions.called_by, gm.graph.nodes))
    ctx = dataclasses.replace(ctx, hardware=dataclasses.replace(DEAR_KERNELS, gather_tensor_overhead=1.9e-6))
    run_pass(CoalesceCollectives(fuses_copies=True), gm, ctx)
    parameters = {parameter: node for node in gm.graph.nodes if (parameter := tags.meta_of(node).param)}
    read = {name.rpartition(".")[2]: launches.is_read_by_a_library(node) for name, node in parameters.items()}
    assert read == {"weight": True, "bias": False} if kind == "forward" else {"weight": True}


def test_copies_the_small_gradients_together_wherever_they_are() -> None:
    gm, _ = coalesced(graphs.trace(graphs.Norms(), world_size=4), "backward", MATRICES)
    assert_golden(text(gm), "coalesce_collectives_small_gradients")


def test_pads_only_the_uneven_gradient() -> None:
    layer = graphs.Layer()
    layer.bias = nn.Parameter(torch.randn(1, 4))
    gm, _ = coalesced(graphs.trace(layer), "backward", DEAR_COPIES)
    assert_expected_inline(
        text(gm),
        """\
%t: f32[4, 2] = input
%tangents_1: f32[2, 4] = input
%sum_1: f32[1, 4] = aten.sum.dim_IntList(%tangents_1, [0], True)  # grad=bias
%mm_1: f32[4, 4] = aten.mm(%t, %tangents_1)  # grad=weight
%constant_pad_nd: f32[2, 4] = aten.constant_pad_nd(%sum_1, [0, 0, 0, 1])
%view_1: f32[8] = aten.view(%constant_pad_nd, [-1])
%view_2: f32[16] = aten.view(%mm_1, [-1])
%reduce_root: (f32[4], f32[8]) = c10d.reduce_scatter_tensor_coalesced([%view_1, %view_2], 'avg', 2, '0')  # unit=@0
%getitem: f32[4] = getitem(%reduce_root, 0)
%getitem_1: f32[8] = getitem(%reduce_root, 1)
%reduced_root: f32[4] = c10d.wait_tensor(%getitem)  # unit=@0
%reduced_root_1: f32[8] = c10d.wait_tensor(%getitem_1)  # unit=@0
%cat: f32[12] = aten.cat([%reduced_root_1, %reduced_root])
return %cat, None""",
    )


def test_does_not_send_what_backward_does_not_read() -> None:
    gm, _ = coalesced(graphs.two_layers(), "backward", DEAR_COPIES)
    (launch,) = collectives.unshard_launches(gm.graph)
    assert launch.target is collectives.ALL_GATHER  # the weight of layer 1; no bias
    assert launch.meta["val"].numel() == 16


def test_keeps_the_sums_of_fsdp2_where_asked() -> None:
    gm, _ = coalesced(graphs.two_layers(), "backward", DEAR_COPIES, same_sums=True)
    assert {launch.target for launch in collectives.reduce_launches(gm.graph)} == {collectives.REDUCE_SCATTER}


def test_never_copies_what_it_sends_of_a_shard() -> None:
    gm, _ = coalesced(graphs.gpt(), "forward", DEAR_COPIES)
    views = {torch.ops.aten.slice.Tensor}
    for launch in collectives.unshard_launches(gm.graph):
        sources = {
            source if source.op == "placeholder" else source.all_input_nodes[0] for source in launch.all_input_nodes
        }
        assert all(source.op == "placeholder" for source in sources)
        assert {source.target for source in launch.all_input_nodes if source.op != "placeholder"} <= views


def test_says_why() -> None:
    _, ctx = coalesced(graphs.two_layers(), "forward", MATRICES)
    notes = [f"{note.node}: {note.why}" for note in ctx.history.last("forward").notes]
    assert_expected_inline(
        "\n".join(notes),
        """\
unshard_layers_0: layers.0: 2 tensors, 2500000 us of copies less for 1000000 us more on the link
unshard_layers_1: layers.1: 2 tensors, 2500000 us of copies less for 1000000 us more on the link""",
    )


def test_leaves_a_launch_of_the_models_own_alone() -> None:
    gm, ctx = graphs.two_layers().at("forward", after=InsertCollectives)
    launch, *_ = collectives.unshard_launches(gm.graph)
    with gm.graph.inserting_before(launch):
        x = next(node for node in gm.graph.find_nodes(op="placeholder") if tags.meta_of(node).shard is None)
        other = gm.graph.call_function(collectives.ALL_GATHER, (x, 2, "0"))
        other.meta["val"] = torch.empty(4, 4, device="meta")
        waited = gm.graph.call_function(collectives.WAIT, (other,))
        waited.meta["val"] = other.meta["val"]
    gm.graph.output_node().args = ((*signature.results_of(gm.graph), waited),)
    ctx = dataclasses.replace(ctx, hardware=DEAR_COPIES)
    assert CoalesceCollectives().apply(gm, ctx)
    assert ctx.declined == []
    assert other.all_input_nodes == [x]


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_changes_nothing_when_run_again(kind: GraphKind) -> None:
    gm, ctx = coalesced(graphs.gpt(), kind, MATRICES)
    assert_changes_nothing(CoalesceCollectives(), gm, ctx)


@pytest.mark.parametrize("world_size", [1, 4])
@each_once(build=graphs.EVERY_UNIT, hardware=[DEAR_COPIES, MATRICES])
def test_computes_the_same_bits(build: Callable[..., Traced], world_size: int, hardware: HardwareSpec) -> None:
    traced = build(world_size=world_size)
    passes = [BucketCollectives(size=1e-4), CoalesceCollectives()]
    assert_same_step(step(traced, *passes, hardware=hardware), step(traced), rtol=0, atol=0)
    if build not in (graphs.two_dtypes, graphs.mixed_precision):  # their reference computes in one dtype
        assert_same_step(step(traced, *passes, hardware=hardware), reference_step(traced))
