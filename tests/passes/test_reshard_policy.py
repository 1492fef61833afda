"""ReshardPolicy: what the partitioner is told about each marker, and that it makes no difference to the numbers."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.pipeline import DEFAULT, DYNAMO, Pipeline
from fxshard.passes.reshard_policy import ReshardPolicy
from tests import graphs
from tests.graphs import Traced, assert_changes_nothing, assert_golden, run_pass, text
from tests.steps import assert_same_step, step


def tagged(traced: Traced) -> str:
    gm, ctx = traced.at("joint", after=DedupUnshard)
    assert run_pass(ReshardPolicy(), gm, ctx)
    return text(gm)


def test_has_backward_gather_again_what_is_resharded() -> None:
    assert_golden(tagged(graphs.two_layers()), "reshard_policy_resharded")


def test_has_backward_keep_what_is_not_resharded() -> None:
    assert_golden(tagged(graphs.two_layers(reshard_after_forward=False)), "reshard_policy_kept")


def test_tags_casts_and_views_of_a_parameter_as_well() -> None:
    assert_expected_inline(
        tagged(graphs.casting(reshard_after_forward=True)),
        """\
%x: f32[2, 4] = input
%shard_root: f32[8] = input  # flat of root
%tangents_1: bf16[2, 4] = input
%_to_copy: bf16[2, 4] = aten._to_copy(%x, dtype=bf16)
%unshard: f32[4, 4] = fxshard.unshard(%shard_root, '#0@0', 0, [4, 4], f32)  # param=weight  # recompute=MUST_RECOMPUTE
%_to_copy_1: bf16[4, 4] = aten._to_copy(%unshard, dtype=bf16)  # recompute=MUST_RECOMPUTE
%t: bf16[4, 4] = aten.t(%_to_copy_1)  # recompute=MUST_RECOMPUTE
%mm: bf16[2, 4] = aten.mm(%_to_copy, %t)
%t_1: bf16[4, 2] = aten.t(%tangents_1)
%mm_1: bf16[4, 4] = aten.mm(%t_1, %_to_copy)
%t_2: bf16[4, 4] = aten.t(%mm_1)
%t_3: bf16[4, 4] = aten.t(%t_2)
%_to_copy_2: f32[4, 4] = aten._to_copy(%t_3, dtype=f32, layout=strided)  # grad=weight
%reduce_grad: f32[8] = fxshard.reduce_grad(%_to_copy_2, '#0@0', 0, 8, f32)
return %mm, None, %reduce_grad""",
    )


def test_gathers_again_what_two_checkpointed_calls_read() -> None:
    checkpointed = graphs.checkpointed_twice(reshard_after_forward=True)
    torch.manual_seed(0)
    plain = graphs.trace(graphs.CalledTwice(), reshard_after_forward=True)
    backward, _ = checkpointed.at("backward", after=InsertCollectives)
    assert text(backward).count("all_gather") == 1
    assert_same_step(step(checkpointed), step(plain), rtol=0.0, atol=0.0)


def test_has_one_rank_view_its_shard_again() -> None:
    assert_expected_inline(
        tagged(graphs.read_twice(world_size=1)),
        """\
%shard_root: f32[16] = input  # flat of root
%x: f32[2, 4] = input
%tangents_1: f32[2, 4] = input
%unshard: f32[4, 4] = fxshard.unshard(%shard_root, '#0@0', 0, [4, 4], f32)  # param=weight  # recompute=MUST_RECOMPUTE
%mm: f32[2, 4] = aten.mm(%x, %unshard)
%mm_1: f32[2, 4] = aten.mm(%mm, %unshard)
%t: f32[4, 2] = aten.t(%mm)
%mm_2: f32[4, 4] = aten.mm(%t, %tangents_1)  # grad=weight
%t_1: f32[4, 4] = aten.t(%unshard)  # recompute=MUST_RECOMPUTE
%mm_3: f32[2, 4] = aten.mm(%tangents_1, %t_1)
%reduce_grad: f32[16] = fxshard.reduce_grad(%mm_2, '#0@0', 0, 16, f32)
%t_2: f32[4, 2] = aten.t(%x)
%mm_4: f32[4, 4] = aten.mm(%t_2, %mm_3)  # grad=weight
%reduce_grad_1: f32[16] = fxshard.reduce_grad(%mm_4, '#0@0', 0, 16, f32)
%add: f32[16] = aten.add.Tensor(%reduce_grad, %reduce_grad_1)
return %mm_1, %add, None""",
    )


def test_gathers_in_backward_only_what_forward_resharded() -> None:
    resharded, _ = graphs.two_layers().at("backward", after=InsertCollectives)
    kept, _ = graphs.two_layers(reshard_after_forward=False).at("backward", after=InsertCollectives)
    assert text(resharded).count("all_gather") == 1  # of the layer whose input needs a gradient
    assert text(kept).count("all_gather") == 0


def test_gives_the_same_tags_when_run_again() -> None:
    gm, ctx = graphs.two_layers().at("joint", after=DedupUnshard)
    run_pass(ReshardPolicy(), gm, ctx)
    before = text(gm)
    run_pass(ReshardPolicy(), gm, ctx)
    assert text(gm) == before


def test_leaves_a_graph_without_markers_alone() -> None:
    gm, ctx = graphs.uneven().at("forward", after=InsertCollectives)
    assert_changes_nothing(ReshardPolicy(), gm, ctx)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_leaves_every_bit_of_a_step_as_it_was(reshard_after_forward: bool) -> None:
    kwargs = {"world_size": 4, "reshard_after_forward": reshard_after_forward}
    with_tags = graphs.two_layers(**kwargs)
    without = graphs.two_layers(
        pipeline=Pipeline(dynamo=DYNAMO, joint=DEFAULT.joint[:1], split=DEFAULT.split),
        verify=False,
        **kwargs,
    )
    assert_same_step(step(with_tags), step(without), rtol=0.0, atol=0.0)
