"""InsertCollectives: the whole graph for every kind of unit, what it declines, and the same numbers for all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxshard.errors import InvariantError, UnsupportedGraph
from fxshard.ir import collectives, ops
from fxshard.ir.variant import Variant
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.insert_collectives import InsertCollectives
from tests import feeds, graphs
from tests.graphs import SPLIT, Traced, assert_changes_nothing, assert_golden, run_pass, text
from tests.steps import assert_same_step, reference_step, step


def inserted(traced: Traced, kind: GraphKind) -> str:
    gm, ctx = traced.at(kind, after=DedupUnshard)
    assert run_pass(InsertCollectives(), gm, ctx)
    return text(gm)


@pytest.mark.parametrize("kind", SPLIT)
def test_gathers_each_unit_at_its_first_read_and_reduces_it_after_its_last_gradient(kind: GraphKind) -> None:
    assert_golden(inserted(graphs.two_layers(), kind), f"insert_collectives_{kind}")


@pytest.mark.parametrize("kind", SPLIT)
def test_gathers_and_reduces_each_unit_over_its_own_mesh(kind: GraphKind) -> None:
    assert_golden(inserted(graphs.two_meshes(), kind), f"insert_collectives_two_meshes_{kind}")


def test_averages_what_each_unit_has_reduced_over_its_replicas() -> None:
    assert_golden(inserted(graphs.two_layers(replicas=2), "backward"), "insert_collectives_replicas")


@pytest.mark.parametrize("kind", SPLIT)
def test_gathers_and_reduces_what_each_rank_of_tensor_parallelism_has(kind: GraphKind) -> None:
    """The collectives of DTensor stay where they are, on a group of their own; torch 2.11 hides the mesh in code."""
    found = inserted(feeds.tensor_parallel(count=1), kind)
    before = "_torch_2_11" if "mesh = input" not in inserted(feeds.tensor_parallel(count=1), "forward") else ""
    assert_golden(found, f"insert_collectives_tensor_parallel_{kind}{before}")


def test_divides_behind_the_second_of_two_reductions() -> None:
    assert_golden(inserted(graphs.doubles(replicas=2), "backward"), "insert_collectives_replicas_of_doubles")


def test_averages_a_unit_that_is_replicated_and_not_sharded() -> None:
    gm, ctx = graphs.two_layers(world_size=1, replicas=2).at("backward", after=DedupUnshard)
    assert run_pass(InsertCollectives(), gm, ctx)
    assert [node.name for node in collectives.all_reduce_launches(gm.graph)] == [
        "all_reduce_layers_1",
        "all_reduce_layers_0",
    ]
    assert not collectives.reduce_launches(gm.graph)


@pytest.mark.parametrize("model", [graphs.two_layers, graphs.doubles])
def test_leaves_the_all_reduce_to_the_runtime_where_the_variant_says_so(model: Callable[..., Traced]) -> None:
    traced = model(replicas=2)
    gm, ctx = traced.at("backward", after=DedupUnshard)
    apart = Variant(apart=frozenset(traced.plan.units)).plan(traced.plan)
    assert run_pass(InsertCollectives(), gm, dataclasses.replace(ctx, plan=apart))
    assert collectives.reduce_launches(gm.graph)
    assert not collectives.all_reduce_launches(gm.graph)


def test_the_verifier_knows_which_variant_averages() -> None:
    gm, ctx = graphs.two_layers(replicas=2).at("backward", after=DedupUnshard)
    apart = Variant(apart=frozenset(ctx.plan.units)).plan(ctx.plan)

    class Forget(InsertCollectives):
        def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
            return super().apply(gm, dataclasses.replace(ctx, plan=apart))

    with pytest.raises(InvariantError, match="no all_reduce averages it over the 2 replicas"):
        run_pass(Forget(), gm, ctx)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("model", ["two_layers", "uneven", "doubles", "scalar", "called_twice"])
def test_replicas_have_the_gradients_of_the_whole_batch(model: str, world_size: int) -> None:
    traced = getattr(graphs, model)(world_size=world_size, replicas=2)
    assert_same_step(step(traced), reference_step(traced))


def test_gathers_in_a_graph_without_backward() -> None:
    assert_expected_inline(
        inserted(graphs.trace(graphs.Layer(), train=False), "inference"),
        """\
%shard_root: f32[10] = input  # flat of root
%x: f32[2, 4] = input
%unshard_root: f32[20] = c10d.all_gather_into_tensor(%shard_root, 2, '0')  # unit=@0
%wait_root: f32[20] = c10d.wait_tensor(%unshard_root)  # unit=@0
%view: f32[2, 10] = aten.view(%wait_root, [2, 10])
%slice_1: f32[2, 8] = aten.slice.Tensor(%view, 1, 0, 8)
%clone: f32[2, 8] = aten.clone(%slice_1, memory_format=contiguous_format)
%weight: f32[4, 4] = aten.view(%clone, [4, 4])  # param=weight
%slice_2: f32[2, 2] = aten.slice.Tensor(%view, 1, 8, 10)
%clone_1: f32[2, 2] = aten.clone(%slice_2, memory_format=contiguous_format)
%bias: f32[4] = aten.view(%clone_1, [4])  # param=bias
%mm: f32[2, 4] = aten.mm(%x, %weight)
%add: f32[2, 4] = aten.add.Tensor(%mm, %bias)
return %add""",
    )


def test_trims_the_padding_rows_of_an_uneven_parameter() -> None:
    assert_expected_inline(
        inserted(graphs.uneven(), "forward"),
        """\
%shard_root: f32[18] = input  # flat of root
%x: f32[2, 5] = input
%unshard_root: f32[36] = c10d.all_gather_into_tensor(%shard_root, 2, '0')  # unit=@0
%wait_root: f32[36] = c10d.wait_tensor(%unshard_root)  # unit=@0
%view: f32[2, 18] = aten.view(%wait_root, [2, 18])
%slice_1: f32[2, 15] = aten.slice.Tensor(%view, 1, 0, 15)
%clone: f32[2, 15] = aten.clone(%slice_1, memory_format=contiguous_format)
%view_1: f32[30] = aten.view(%clone, [-1])
%slice_2: f32[25] = aten.slice.Tensor(%view_1, 0, 0, 25)
%weight: f32[5, 5] = aten.view(%slice_2, [5, 5])  # param=weight
%slice_3: f32[2, 3] = aten.slice.Tensor(%view, 1, 15, 18)
%clone_1: f32[2, 3] = aten.clone(%slice_3, memory_format=contiguous_format)
%view_3: f32[6] = aten.view(%clone_1, [-1])
%slice_4: f32[5] = aten.slice.Tensor(%view_3, 0, 0, 5)
%bias: f32[5] = aten.view(%slice_4, [5])  # param=bias
%mm: f32[2, 5] = aten.mm(%x, %weight)
%add: f32[2, 5] = aten.add.Tensor(%mm, %bias)
%t: f32[5, 2] = aten.t(%x)
return %add, %t""",
    )


def test_pads_the_gradients_of_an_uneven_parameter() -> None:
    assert_expected_inline(
        inserted(graphs.uneven(), "backward"),
        """\
%t: f32[5, 2] = input
%tangents_1: f32[2, 5] = input
%sum_1: f32[1, 5] = aten.sum.dim_IntList(%tangents_1, [0], True)
%view: f32[5] = aten.view(%sum_1, [5])  # grad=bias
%mm_1: f32[5, 5] = aten.mm(%t, %tangents_1)  # grad=weight
%_chunk_cat: f32[2, 18] = aten._chunk_cat([%mm_1, %view], 0, 2)
%view_1: f32[36] = aten.view(%_chunk_cat, [-1])
%reduce_root: f32[18] = c10d.reduce_scatter_tensor(%view_1, 'avg', 2, '0')  # unit=@0
%reduced_root: f32[18] = c10d.wait_tensor(%reduce_root)  # unit=@0
return %reduced_root, None""",
    )


def test_gathers_two_dtypes_each_by_itself() -> None:
    assert_golden(inserted(graphs.two_dtypes(), "forward"), "insert_collectives_two_dtypes")


def test_reduces_two_dtypes_each_by_itself() -> None:
    assert_expected_inline(
        inserted(graphs.two_dtypes(), "backward"),
        """\
%t: f32[4, 2] = input
%tangents_1: f32[2, 4] = input
%sum_1: f32[1, 4] = aten.sum.dim_IntList(%tangents_1, [0], True)
%view: f32[4] = aten.view(%sum_1, [4])
%_to_copy: bf16[4] = aten._to_copy(%view, dtype=bf16)  # grad=bias
%view_2: bf16[4] = aten.view(%_to_copy, [-1])
%reduce_root_1: bf16[2] = c10d.reduce_scatter_tensor(%view_2, 'avg', 2, '0')  # unit=@0
%reduced_root_1: bf16[2] = c10d.wait_tensor(%reduce_root_1)  # unit=@0
%mm_1: f32[4, 4] = aten.mm(%t, %tangents_1)  # grad=weight
%view_1: f32[16] = aten.view(%mm_1, [-1])
%reduce_root: f32[8] = c10d.reduce_scatter_tensor(%view_1, 'avg', 2, '0')  # unit=@0
%reduced_root: f32[8] = c10d.wait_tensor(%reduce_root)  # unit=@0
return %reduced_root, None, %reduced_root_1""",
    )


def test_casts_the_shard_before_it_gathers_in_mixed_precision() -> None:
    assert_expected_inline(
        inserted(graphs.mixed_precision(), "forward"),
        """\
%shard_root: f32[10] = input  # flat of root
%x: bf16[2, 4] = input
%_to_copy: bf16[10] = aten._to_copy(%shard_root, dtype=bf16)
%unshard_root: bf16[20] = c10d.all_gather_into_tensor(%_to_copy, 2, '0')  # unit=@0
%wait_root: bf16[20] = c10d.wait_tensor(%unshard_root)  # unit=@0
%view: bf16[2, 10] = aten.view(%wait_root, [2, 10])
%slice_1: bf16[2, 8] = aten.slice.Tensor(%view, 1, 0, 8)
%clone: bf16[2, 8] = aten.clone(%slice_1, memory_format=contiguous_format)
%weight: bf16[4, 4] = aten.view(%clone, [4, 4])  # param=weight
%slice_2: bf16[2, 2] = aten.slice.Tensor(%view, 1, 8, 10)
%clone_1: bf16[2, 2] = aten.clone(%slice_2, memory_format=contiguous_format)
%bias: bf16[4] = aten.view(%clone_1, [4])  # param=bias
%mm: bf16[2, 4] = aten.mm(%x, %weight)
%add: bf16[2, 4] = aten.add.Tensor(%mm, %bias)
%t: bf16[4, 2] = aten.t(%x)
return %add, %t""",
    )


def test_casts_the_gradients_before_it_reduces_in_mixed_precision() -> None:
    assert_expected_inline(
        inserted(graphs.mixed_precision(), "backward"),
        """\
%t: bf16[4, 2] = input
%tangents_1: bf16[2, 4] = input
%sum_1: bf16[1, 4] = aten.sum.dim_IntList(%tangents_1, [0], True)
%view: bf16[4] = aten.view(%sum_1, [4])  # grad=bias
%mm_1: bf16[4, 4] = aten.mm(%t, %tangents_1)  # grad=weight
%_to_copy: f32[4, 4] = aten._to_copy(%mm_1, dtype=f32)
%_to_copy_1: f32[4] = aten._to_copy(%view, dtype=f32)
%_chunk_cat: f32[2, 10] = aten._chunk_cat([%_to_copy, %_to_copy_1], 0, 2)
%view_1: f32[20] = aten.view(%_chunk_cat, [-1])
%reduce_root: f32[10] = c10d.reduce_scatter_tensor(%view_1, 'avg', 2, '0')  # unit=@0
%reduced_root: f32[10] = c10d.wait_tensor(%reduce_root)  # unit=@0
return %reduced_root, None""",
    )


def test_reduces_and_returns_gradients_in_the_dtype_that_the_user_wants() -> None:
    layer = graphs.Layer()
    layer.weight.grad_dtype = torch.float64
    assert_golden(inserted(graphs.trace(layer), "backward"), "insert_collectives_grad_dtype")


def test_divides_float64_gradients_before_and_after_the_sum() -> None:
    assert_expected_inline(
        inserted(graphs.doubles(world_size=4), "backward"),
        """\
%t: f64[4, 2] = input
%tangents_1: f64[2, 4] = input
%sum_1: f64[1, 4] = aten.sum.dim_IntList(%tangents_1, [0], True)
%view: f64[4] = aten.view(%sum_1, [4])  # grad=bias
%mm_1: f64[4, 4] = aten.mm(%t, %tangents_1)  # grad=weight
%_chunk_cat: f64[4, 5] = aten._chunk_cat([%mm_1, %view], 0, 4)
%view_1: f64[20] = aten.view(%_chunk_cat, [-1])
%div: f64[20] = aten.div.Tensor(%view_1, 2)
%reduce_root: f64[5] = c10d.reduce_scatter_tensor(%div, 'sum', 4, '0')  # unit=@0
%reduced_root: f64[5] = c10d.wait_tensor(%reduce_root)  # unit=@0
%div_1: f64[5] = aten.div.Tensor(%reduced_root, 2.0)
return %div_1, None""",
    )


def test_gathers_a_frozen_parameter_with_the_trained_ones() -> None:
    assert_golden(inserted(graphs.frozen_weight(), "forward"), "insert_collectives_frozen_weight")


def test_reduces_no_gradient_of_a_frozen_parameter() -> None:
    assert_expected_inline(
        inserted(graphs.frozen_weight(), "backward"),
        """\
%tangents_1: f32[2, 4] = input
%sum_1: f32[1, 4] = aten.sum.dim_IntList(%tangents_1, [0], True)
%view: f32[4] = aten.view(%sum_1, [4])  # grad=bias
%view_1: f32[4] = aten.view(%view, [-1])
%reduce_root: f32[2] = c10d.reduce_scatter_tensor(%view_1, 'avg', 2, '0')  # unit=@0
%reduced_root: f32[2] = c10d.wait_tensor(%reduce_root)  # unit=@0
return None, None, %reduced_root""",
    )


def test_only_views_the_shard_of_one_rank() -> None:
    assert_golden(inserted(graphs.two_layers(world_size=1), "forward"), "insert_collectives_one_rank_forward")


def test_launches_nothing_for_the_gradients_of_one_rank() -> None:
    assert_golden(inserted(graphs.two_layers(world_size=1), "backward"), "insert_collectives_one_rank_backward")


def test_gathers_a_weight_that_is_read_twice_once() -> None:
    assert_expected_inline(
        inserted(graphs.read_twice(), "forward"),
        """\
%shard_root: f32[8] = input  # flat of root
%x: f32[2, 4] = input
%unshard_root: f32[16] = c10d.all_gather_into_tensor(%shard_root, 2, '0')  # unit=@0
%wait_root: f32[16] = c10d.wait_tensor(%unshard_root)  # unit=@0
%weight: f32[4, 4] = aten.view(%wait_root, [4, 4])  # param=weight
%mm: f32[2, 4] = aten.mm(%x, %weight)
%mm_1: f32[2, 4] = aten.mm(%mm, %weight)
%t: f32[4, 2] = aten.t(%mm)
%t_1: f32[4, 4] = aten.t(%weight)
%t_2: f32[4, 2] = aten.t(%x)
return %mm_1, %t, %t_1, %t_2""",
    )


def test_reduces_a_weight_that_is_read_twice_once() -> None:
    assert_expected_inline(
        inserted(graphs.read_twice(), "backward"),
        """\
%t: f32[4, 2] = input
%t_1: f32[4, 4] = input  # kept=weight
%t_2: f32[4, 2] = input
%tangents_1: f32[2, 4] = input
%mm_2: f32[4, 4] = aten.mm(%t, %tangents_1)  # grad=weight
%mm_3: f32[2, 4] = aten.mm(%tangents_1, %t_1)
%mm_4: f32[4, 4] = aten.mm(%t_2, %mm_3)  # grad=weight
%add_1: f32[4, 4] = aten.add.Tensor(%mm_2, %mm_4)
%view: f32[16] = aten.view(%add_1, [-1])
%reduce_root: f32[8] = c10d.reduce_scatter_tensor(%view, 'avg', 2, '0')  # unit=@0
%reduced_root: f32[8] = c10d.wait_tensor(%reduce_root)  # unit=@0
return %reduced_root, None""",
    )


def test_gathers_a_module_that_is_called_twice_at_each_call() -> None:
    assert_golden(inserted(graphs.called_twice(), "forward"), "insert_collectives_called_twice_forward")


def test_reduces_a_module_that_is_called_twice_once() -> None:
    assert_golden(inserted(graphs.called_twice(), "backward"), "insert_collectives_called_twice_backward")


def test_gathers_a_scalar_and_keeps_one_copy() -> None:
    assert_expected_inline(
        inserted(graphs.scalar(), "forward"),
        """\
%shard_root: f32[1] = input  # flat of root
%x: f32[2, 4] = input
%unshard_root: f32[2] = c10d.all_gather_into_tensor(%shard_root, 2, '0')  # unit=@0
%wait_root: f32[2] = c10d.wait_tensor(%unshard_root)  # unit=@0
%view: f32[2] = aten.view(%wait_root, [-1])
%slice_1: f32[1] = aten.slice.Tensor(%view, 0, 0, 1)
%gain: f32[] = aten.view(%slice_1, [])  # param=gain
%mul: f32[2, 4] = aten.mul.Tensor(%x, %gain)
return %mul, %x""",
    )


def test_reduces_a_scalar_into_the_slot_of_every_rank() -> None:
    assert_expected_inline(
        inserted(graphs.scalar(), "backward"),
        """\
%x: f32[2, 4] = input
%tangents_1: f32[2, 4] = input
%mul_1: f32[2, 4] = aten.mul.Tensor(%tangents_1, %x)
%sum_1: f32[] = aten.sum(%mul_1)  # grad=gain
%expand: f32[2] = aten.expand(%sum_1, [2])
%view: f32[2] = aten.view(%expand, [2])
%clone: f32[2] = aten.clone(%view, memory_format=contiguous_format)
%reduce_root: f32[1] = c10d.reduce_scatter_tensor(%clone, 'avg', 2, '0')  # unit=@0
%reduced_root: f32[1] = c10d.wait_tensor(%reduce_root)  # unit=@0
return %reduced_root, None""",
    )


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_changes_nothing_when_run_again(kind: GraphKind) -> None:
    gm, ctx = graphs.two_layers().at(kind, after=InsertCollectives)
    assert_changes_nothing(InsertCollectives(), gm, ctx)


def test_leaves_a_graph_without_markers_alone() -> None:
    _, ctx = graphs.uneven().at("forward")
    gm = fx.symbolic_trace(lambda x: x + 1)
    assert_changes_nothing(InsertCollectives(), gm, ctx)


def test_declines_arithmetic_on_a_gradient_of_a_shard() -> None:
    gm, ctx = graphs.read_twice().at("backward", after=DedupUnshard)
    (result,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    with gm.graph.inserting_after(result):
        doubled = gm.graph.call_function(torch.ops.aten.mul.Tensor, (result, 2))
    gm.graph.output_node().args = ((doubled, None),)
    with pytest.raises(UnsupportedGraph) as refused:
        run_pass(InsertCollectives(), gm, ctx)
    assert_golden(str(refused.value), "insert_collectives_declines")


def test_declines_a_marker_inside_a_subgraph() -> None:
    gm, ctx = graphs.read_twice().at("forward", after=DedupUnshard)
    (marker,) = [node for node in gm.graph.nodes if ops.is_unshard(node)]
    inner = fx.Graph()
    shard = inner.placeholder("shard")
    inner.output(inner.call_function(ops.UNSHARD, (shard, *marker.args[1:])))
    gm.add_module("branch", fx.GraphModule({}, inner))
    with pytest.raises(UnsupportedGraph, match=r"weight is read inside a subgraph \(cond.*Read it outside"):
        run_pass(InsertCollectives(), gm, ctx)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize(
    "build", [build for build in graphs.EVERY_UNIT if build not in (graphs.two_dtypes, graphs.mixed_precision)]
)
def test_computes_what_unsharded_training_computes(build: Callable[..., Traced], world_size: int) -> None:
    traced = build(world_size=world_size)
    assert_same_step(step(traced), reference_step(traced))
