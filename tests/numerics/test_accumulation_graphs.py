"""Accumulation where a unit has several graphs, a graph several units, or autograd wants something else."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import fxshard
from fxshard.errors import FxshardError, RankMismatchError, UnsupportedGraph
from fxshard.ir import collectives, tags
from fxshard.passes._base import GraphPass, PassContext
from fxshard.passes.pipeline import Pipeline
from fxshard.sharding.sharded_module import ShardedModule, units_under
from fxshard.testing import emulated_link
from tests.models import Doing
from tests.numerics.harness import (
    EAGER,
    Prepare,
    Run,
    Tools,
    blocks_of,
    check_against_unsharded,
    check_close,
    compile_each_block,
    compile_module,
    fxshard_system,
    only_compile,
    only_shard,
    shard_and_compile,
    start,
)
from tests.numerics.microbatches import in_turn, loss_of, set_sync, several, total
from tests.numerics.models import WIDTH, ReadOnBothSides
from tests.numerics.scenarios import ONE_BLOCK, REGRESSION
from tests.ranks import two_ranks


@pytest.mark.slow
@two_ranks
def test_adds_each_graphs_gradient_of_one_parameter_once() -> None:
    check_close(replace(REGRESSION, model=ReadOnBothSides, backward=several))


class Halves(nn.Module):
    """One unit of two graphs, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        return cast(Tensor, self.b(x)) if both else x


def half_by_half(run: Run, step: int) -> Tensor:
    """What one half has reduced is not added again while the other one still waits."""
    plan = [(False, True, True), (True, False, False), (False, True, False), (True, True, True)]

    def loss(i: int) -> Tensor:
        x, y = run.batch(10 * step + i)
        return cast(Tensor, (run.model(x, plan[i][2]) - y).square().mean())

    flags = [{"requires_gradient_sync": sync, "is_last_backward": last} for sync, last, _ in plan]
    return in_turn(run, step, *flags, loss=loss)


@pytest.mark.slow
@two_ranks
def test_forgets_what_one_graph_has_reduced_while_another_waits() -> None:
    check_against_unsharded(replace(REGRESSION, model=Halves, backward=half_by_half))


class ReturnsItsInput(nn.Module):
    """Returns its input, as rows, besides its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1, WIDTH), torch.tanh(self.layer(x))


class Dense(nn.Module):
    """Adds up what comes in to each of its blocks, which share a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsItsInput() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for block in self.blocks:
            entered, x = block(x)
            total = total + entered
        return cast(Tensor, self.head(total + x))


@pytest.mark.slow
@two_ranks
def test_knows_blocks_of_one_graph_apart_that_return_views_of_their_inputs() -> None:
    check_close(replace(REGRESSION, model=Dense, backward=several, prepare=compile_each_block))


def perturbed(run: Run, step: int) -> Tensor:
    """Each microbatch is changed along its gradient, which is none of the parameters', with and without reductions."""

    def loss(i: int) -> Tensor:
        x, y = run.batch(10 * step + i)
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(run.scenario.loss(run.model, x, y), x)
        x = (x + 0.1 * gradient.sign()).detach()  # a mean over fewer rows is larger
        return run.scenario.loss(run.model, x, y)

    return in_turn(run, step, {"requires_gradient_sync": False}, {"requires_gradient_sync": True}, loss=loss)


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, only_shard])
def test_a_gradient_of_the_input_leaves_what_waits(prepare: Prepare) -> None:
    check_against_unsharded(replace(ONE_BLOCK, backward=perturbed, prepare=prepare))


def wrapped(model: nn.Module, tools: Tools) -> nn.Module:
    return nn.Sequential(only_compile(model, tools))


def with_no_sync_around_the_wrapper(run: Run, step: int) -> Tensor:
    if not run.system.ours:
        return several(run, step)
    losses = []
    with fxshard.no_sync(run.model):
        for i in range(2):
            losses.append(loss_of(run, step, i))
            losses[-1].backward()
    assert all(unit.step.accumulation.waiting for unit in units_under(run.model))
    losses.append(loss_of(run, step, 2))
    losses[-1].backward()
    return total(losses)


@pytest.mark.slow
@two_ranks
def test_no_sync_of_a_wrapper_holds_for_the_model_that_is_sharded_inside() -> None:
    backward = with_no_sync_around_the_wrapper
    check_against_unsharded(replace(REGRESSION, backward=backward, prepare=wrapped))


def chooses() -> nn.Module:
    """How many rows it computes on depends on their values."""
    up, down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Doing(lambda m, x: m.down(torch.tanh(m.up(x))[x[:, 0] > -9.0]), up=up, down=down)


@pytest.mark.slow
@two_ranks
def test_accumulates_sizes_that_data_decides() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_close(replace(REGRESSION, model=chooses, backward=several))


@pytest.mark.slow
@two_ranks
def test_shows_every_backward_of_units_that_are_set_differently() -> None:
    run = start(REGRESSION, fxshard_system())
    first, second = cast(list[ShardedModule], list(cast(Any, run.model).blocks))
    for waits in ((first,), (second,), (first, second)):
        for module in waits:
            module.set_requires_gradient_sync(False)
        run.loss(0).backward()
        set_sync(run.model, True)
        run.loss(0).backward()
    kinds = [graph.kind for graph in fxshard.compiled_graphs(run.model)]
    assert kinds.count("backward_mixed") == 3
    assert kinds.count("backward_final") == 3


@pytest.mark.parametrize("compiled", [True, False])
def test_one_rank_hands_out_no_accumulator_as_a_gradient(compiled: bool) -> None:
    torch._dynamo.reset()
    with emulated_link(1) as link:
        model = nn.Linear(WIDTH, WIDTH, bias=False)  # of several gradients a shard is put together anew
        fxshard.fully_shard(model, mesh=link.mesh)
        call = compile_module(model, options=EAGER) if compiled else model
        x = torch.randn(4, WIDTH)
        with fxshard.no_sync(model):
            call(x).sum().backward()
        cast(ShardedModule, model).reduce_waiting_gradients()
        grads = [cast(Any, parameter.grad).to_local() for parameter in model.parameters()]
        before = [grad.clone() for grad in grads]
        with fxshard.no_sync(model):
            call(x + 1).sum().backward()
        assert all(torch.equal(grad, old) for grad, old in zip(grads, before, strict=True))
    torch._dynamo.reset()


@pytest.mark.slow
@two_ranks
def test_ranks_that_reduce_different_waiting_gradients_are_told_so() -> None:
    run = start(REGRESSION, fxshard_system())
    with fxshard.no_sync(run.model):
        run.loss(0).backward()
    (first, *_) = blocks_of(cast(Any, run.model)._orig_mod)
    if dist.get_rank() == 0:
        cast(ShardedModule, first).reset_iter_state()
    message = r"rank 0 \(waiting\): reduce_scatter of waiting gradients of .* on group"
    with pytest.raises(RankMismatchError, match=message):
        cast(ShardedModule, run.model).reduce_waiting_gradients()


@dataclass(frozen=True, kw_only=True)
class FailsToFinish(GraphPass):
    """Refuses the last microbatch's backward on rank 1."""

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        waits = any(tags.meta_of(node).acc for node in gm.graph.find_nodes(op="placeholder"))
        if dist.get_rank() == 1 and waits and collectives.reduce_launches(gm.graph):
            raise UnsupportedGraph("not on this rank")
        return False


@two_ranks
def test_a_variant_that_one_rank_cannot_compile_is_an_error_on_both() -> None:
    add = functools.partial(_with_pass, FailsToFinish())
    run = start(ONE_BLOCK, fxshard_system(passes=add))
    expected = "not on this rank" if dist.get_rank() else "rank 1 could not compile.*not on this rank"
    with pytest.raises(FxshardError, match=f"(?s){expected}"):
        several(run, 0)


def _with_pass(step: GraphPass, pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, split=(*pipeline.split, step))
