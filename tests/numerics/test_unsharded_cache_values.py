"""Parameters that stay gathered are never old: every write is seen, and optimizers ask before they step."""

from __future__ import annotations

import gc
import weakref
from importlib import import_module
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import RankMismatchError, UnsupportedGraph
from fxshard.runtime.step_hooks import ModelContext
from fxshard.sharding.sharded_module import ShardedModule, units_under
from fxshard.testing import emulated_link
from tests.numerics.harness import EAGER, compile_module, fxshard_system, start, train_step
from tests.numerics.microbatches import holds, holds_any, set_kept
from tests.numerics.models import MLP, rows
from tests.numerics.scenarios import ONE_BLOCK, REGRESSION
from tests.numerics.writes import WRITES
from tests.ranks import two_ranks


@two_ranks
def test_sees_every_write() -> None:
    runs = [start(ONE_BLOCK, fxshard_system()) for _ in range(2)]
    for name, write in WRITES.items():
        losses = []
        for run, keeps in zip(runs, (False, True), strict=True):
            set_kept(run.model, keeps)
            before = run.loss(0)
            before.backward()
            assert holds(run) == keeps, name
            write(run)
            losses.append([run.loss(0).detach(), run.loss(1).detach()])
            assert losses[-1][0] != before, f"{name} wrote nothing"
            for parameter in run.model.parameters():  # the optimizer may have others by now
                parameter.grad = None
        assert losses[0] == losses[1], name


@two_ranks
def test_refuses_an_optimizer_step_that_would_leave_gradients_behind() -> None:
    run = start(ONE_BLOCK, fxshard_system())
    train_step(run, 0)
    before = [cast(DTensor, p).to_local().clone() for p in run.model.parameters()]
    with fxshard.no_sync(run.model):
        run.loss(1).backward()
    with pytest.raises(UnsupportedGraph, match=r"(?s)an optimizer steps while gradients of unit.*reduce_waiting"):
        run.optim.step()
    assert all(torch.equal(cast(DTensor, p).to_local(), x) for p, x in zip(run.model.parameters(), before, strict=True))
    torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).step()  # of another model
    cast(ShardedModule, run.model).reset_iter_state()
    run.optim.step()


def test_sees_values_that_replaced_others_as_often_as_they_were_written() -> None:
    with emulated_link(2) as link:
        model = nn.Linear(4, 4)
        fxshard.fully_shard(model, mesh=link.mesh)
        set_kept(model, True)
        step, x = compile_module(model, options=EAGER), torch.randn(2, 4)
        (unit,) = units_under(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0)
        before = step(x)
        epochs = {unit.epoch()}
        model.to_empty(device="cpu")
        with torch.no_grad():
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.zero_()
                step(x)
                assert unit.epoch() not in epochs
                epochs.add(unit.epoch())
            assert torch.equal(step(x), torch.zeros_like(before))
    torch._dynamo.reset()


def test_two_models_may_be_resident_at_once() -> None:
    with emulated_link(2) as link:
        models = [nn.Linear(4, 4) for _ in range(2)]
        for model in models:
            fxshard.fully_shard(model, mesh=link.mesh)
            set_kept(model, True)
            step = compile_module(model, options=EAGER)
            step(torch.randn(2, 4)).sum().backward()
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not any(map(holds_any, models))
    torch._dynamo.reset()


@pytest.mark.slow
@two_ranks
def test_one_pair_of_hooks_watches_the_optimizers_of_all_models_and_holds_none() -> None:
    hooks = import_module("torch.optim.optimizer")._global_optimizer_post_hooks
    run = start(REGRESSION, fxshard_system(resident_gib=1))
    before = len(hooks)
    other = start(REGRESSION, fxshard_system(resident_gib=1))
    for each in (run, other):
        each.loss(0).backward()
    assert len(hooks) == before
    model = weakref.ref(other.model)
    del other, each
    torch._dynamo.reset()
    gc.collect()
    assert model() is None


@pytest.mark.slow
@two_ranks
def test_ranks_that_keep_other_parameters_get_an_error() -> None:
    run = start(REGRESSION, fxshard_system(resident_gib=1 - dist.get_rank()))
    with pytest.raises(RankMismatchError, match=r"(?s)the ranks launch different collectives.*all parameters"):
        with fxshard.no_sync(run.model):
            run.loss(0).backward()


@pytest.mark.slow
@two_ranks
def test_no_sync_holds_for_what_is_sharded_inside_beside_what_was_before() -> None:
    """The second part is sharded by its first call, inside the block; the first part was before."""
    parts = nn.ModuleDict({"first": MLP(), "second": MLP()})
    runs = {name: compile_module(part, EAGER) for name, part in parts.items()}
    x, y = rows()(0, dist.get_rank())

    def backward(name: str) -> None:
        (runs[name](x) - y).square().mean().backward()

    backward("first")
    with fxshard.no_sync(parts):
        backward("second")
        assert not any(unit.settings.sync for unit in units_under(parts))
    assert all(unit.settings.sync for unit in units_under(parts))
    backward("second")
    torch.optim.SGD(parts.parameters(), lr=0.1).step()


@pytest.mark.slow
def test_several_models_in_one_graph_end_their_backward_in_the_order_of_the_graph() -> None:
    """What they reduce then must be in one order on all ranks, so it may not depend on addresses."""
    orders = []
    with emulated_link(2):
        for _ in range(4):
            torch._dynamo.reset()
            models = [MLP() for _ in range(4)]
            for model in models:
                fxshard.fully_shard(model)

            def together(x: torch.Tensor, models: list[MLP] = models) -> torch.Tensor:
                outputs = [model(x) for model in models]
                return torch.stack(outputs).mean()

            ended: list[Any] = []
            with mock.patch.object(ModelContext, "backward_runs", autospec=True, side_effect=ended.append):
                cast(Any, torch.compile)(together, backend="fxshard", options=EAGER)(rows()(0, 0)[0]).backward()
            found = [units_under(model)[0].model for model in models]
            orders.append([next(i for i, each in enumerate(found) if each is one) for one in ended])
    assert sorted(orders[0]) == [0, 1, 2, 3]
    assert orders == [orders[0]] * 4
