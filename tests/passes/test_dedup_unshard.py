"""DedupUnshard: one marker per parameter and call, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline

from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.pipeline import DEFAULT, DYNAMO, Pipeline
from tests import graphs
from tests.graphs import Skip, Traced, assert_changes_nothing, assert_golden, run_pass, text
from tests.steps import assert_same_step, step


def test_reads_a_parameter_once_per_call() -> None:
    gm, ctx = graphs.read_twice().at("joint")
    assert run_pass(DedupUnshard(), gm, ctx)
    assert_expected_inline(
        text(gm),
        """\
%shard_root: f32[8] = input  # flat of root
%x: f32[2, 4] = input
%tangents_1: f32[2, 4] = input
%unshard: f32[4, 4] = fxshard.unshard(%shard_root, '#0@0', 0, [4, 4], f32)  # param=weight
%mm: f32[2, 4] = aten.mm(%x, %unshard)
%mm_1: f32[2, 4] = aten.mm(%mm, %unshard)
%t: f32[4, 2] = aten.t(%mm)
%mm_2: f32[4, 4] = aten.mm(%t, %tangents_1)  # grad=weight
%t_1: f32[4, 4] = aten.t(%unshard)
%mm_3: f32[2, 4] = aten.mm(%tangents_1, %t_1)
%reduce_grad: f32[8] = fxshard.reduce_grad(%mm_2, '#0@0', 0, 8, f32)
%t_2: f32[4, 2] = aten.t(%x)
%mm_4: f32[4, 4] = aten.mm(%t_2, %mm_3)  # grad=weight
%reduce_grad_1: f32[8] = fxshard.reduce_grad(%mm_4, '#0@0', 0, 8, f32)
%add: f32[8] = aten.add.Tensor(%reduce_grad, %reduce_grad_1)
return %mm_1, %add, None""",
    )


def test_reads_a_module_that_is_called_twice_at_each_call() -> None:
    gm, ctx = graphs.called_twice().at("joint")
    assert not run_pass(DedupUnshard(), gm, ctx)
    assert_golden(text(gm), "dedup_unshard_called_twice")


def test_changes_nothing_when_run_again() -> None:
    gm, ctx = graphs.read_twice().at("joint", after=DedupUnshard)
    assert_changes_nothing(DedupUnshard(), gm, ctx)


def test_leaves_a_graph_alone_that_reads_each_parameter_once() -> None:
    gm, ctx = graphs.two_layers().at("joint")
    assert_changes_nothing(DedupUnshard(), gm, ctx)


@pytest.mark.parametrize("build", [graphs.two_layers, graphs.read_twice, graphs.called_twice])
def test_leaves_every_bit_of_a_step_as_it_was(build: Callable[..., Traced]) -> None:
    without = Pipeline(dynamo=DYNAMO, joint=(Skip(), *DEFAULT.joint[1:]), split=(Skip(), *DEFAULT.split[1:]))
    merged = build(world_size=4)
    unmerged = build(world_size=4, pipeline=without, verify=False)
    assert_same_step(step(merged), step(unmerged), rtol=0.0, atol=0.0)
