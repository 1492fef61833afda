"""Code that Dynamo gives up on runs a sharded model eagerly: it is named once, with Dynamo's reason."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.runtime import uncompiled_warning
from fxshard.testing import emulated_link
from tests.models import Doing
from tests.numerics.harness import EAGER, compile_module

WIDTH = 4


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    """Dynamo forgets between tests what it has given up on, and so must we."""
    uncompiled_warning._told().clear()
    torch._dynamo.reset()


class Experts(nn.Module):
    """Sends each row to an expert, in a loop that Dynamo gives up on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = ((x.sum(-1) > 0) == bool(number)).nonzero().squeeze(-1)
            if chosen.numel():
                out = out.index_add(0, chosen, expert(x[chosen]) * self.scale)
        return out


class Layers(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.other = (*inner, nn.Identity(), nn.Identity())[:2]

    def forward(self, x: Tensor) -> Tensor:  # without a loop: a graph break in one makes Dynamo give up on all of it
        return self.after(self.other(self.inner(self.before(x).relu())))


class Stack(nn.Module):
    """Blocks that Dynamo gives up on, around which nothing is read before they are."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Experts(), Experts()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.before(x)))


def doing(do: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Has a matrix for this function of the module and its input."""
    return Doing(do, weight=nn.Parameter(torch.eye(WIDTH)))


class Recurrent(nn.Module):
    """A module of torch's that Dynamo does not trace, after something that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x * 2)[0]


def sharded(mesh: DeviceMesh, *inner: nn.Module) -> nn.Module:
    model = Layers(*inner)
    for module in inner:
        fxshard.fully_shard(module, mesh=mesh)
    fxshard.fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(6, WIDTH)).sum().backward()


def train_compiled(model: nn.Module) -> None:
    train(compile_module(model, options=EAGER))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == uncompiled_warning.__name__]


def test_names_the_code_its_first_parameter_and_dynamos_reason(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    train_compiled(sharded(mesh, Experts()))
    (message,) = said(caplog)
    assert re.search(rf"Experts\.forward \(.*{re.escape(__file__)}:\d+\) uncompiled: inner\.experts\.0\.w", message)
    assert "nonzero" in message
    assert "graph break in a for/while loop" in message
    assert "TORCH_LOGS=graph_breaks" in message


def test_names_it_in_the_blocks_of_a_regional_model_and_not_what_is_around_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with emulated_link(2):
        train(cast(Any, torch.compile)(Stack(), backend="fxshard", options={**EAGER, "regional": True}))
    (message,) = said(caplog)
    assert re.search(r"Experts\.forward .* uncompiled: blocks\.0\.", message)


def test_says_it_once_for_all_modules_that_run_the_code(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    train_compiled(sharded(mesh, Experts(), Experts()))
    assert len(said(caplog)) == 1


def test_names_a_function_of_which_dynamo_compiled_the_beginning(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    train_compiled(sharded(mesh, Recurrent()))
    (message,) = said(caplog)
    assert re.search(r"Recurrent\.forward .* uncompiled: inner\.rnn\.weight_ih_l0", message)


def test_names_a_sharded_module_of_torchs_own(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), doing(lambda own, x: x @ own.weight * x.sum().item()))
    fxshard.fully_shard(model, mesh=mesh)
    train_compiled(model)
    (message,) = said(caplog)
    assert "Dynamo left the forward of Linear uncompiled: 0.weight" in message
    assert "Why: " in message


def test_compiles_no_more_than_without_the_warning(mesh: DeviceMesh) -> None:
    compiled = compile_module(sharded(mesh, Experts()), options=EAGER)
    train(compiled, 1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(compiled, 2)


def test_keeps_no_module_alive(mesh: DeviceMesh) -> None:
    model = sharded(mesh, Experts())
    train_compiled(model)
    gone = weakref.ref(model.get_submodule("inner"))
    del model
    torch._dynamo.reset()
    for _ in range(2):  # Dynamo's caches go with the first one
        gc.collect()
    assert gone() is None


# ---- where nothing is to be said


def test_says_nothing_of_a_model_that_is_compiled_whole(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    train_compiled(sharded(mesh, doing(lambda own, x: x @ own.weight)))
    assert said(caplog) == []


def test_says_nothing_of_graph_breaks_that_leave_no_read_outside(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(own: Any, x: Tensor) -> Tensor:
        x = x @ own.weight
        torch._dynamo.graph_break()
        return x @ own.weight

    train_compiled(sharded(mesh, doing(broken)))
    assert said(caplog) == []


@pytest.mark.parametrize("checkpointed", [False, True])
def test_says_nothing_of_a_model_that_is_not_compiled(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, checkpointed: bool
) -> None:
    model = sharded(mesh, Experts())
    train_compiled(sharded(mesh, doing(lambda own, x: x @ own.weight)))
    if checkpointed:
        train(doing(lambda own, x: checkpoint(model, x @ own.weight, use_reentrant=False)))
    else:
        train(model)
    assert said(caplog) == []


@pytest.mark.slow
def test_says_nothing_of_a_forward_that_a_backward_runs_again(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    model = sharded(mesh, Experts())
    forward = torch.compiler.disable(lambda x: checkpoint(model, x, use_reentrant=True).sum())

    def step(x: Tensor) -> None:
        for _ in range(2):  # Dynamo gives up on it, and then finds the frames that the backward runs
            forward(x).backward()

    torch.compile(step, backend="fxshard", options=EAGER)(torch.randn(6, WIDTH, requires_grad=True))
    assert said(caplog) == []


@pytest.mark.parametrize("recursive", [True, False])
def test_says_nothing_of_what_the_user_keeps_from_dynamo(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, recursive: bool
) -> None:
    experts = Experts()
    experts.forward = torch.compiler.disable(experts.forward, recursive=recursive)  # type: ignore[method-assign]
    train_compiled(sharded(mesh, experts))
    assert said(caplog) == []


def test_says_nothing_of_reads_outside_of_forward(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model = sharded(mesh)

    def norms(x: Tensor) -> list[Tensor]:
        found = []
        for name in ("before", "after"):
            torch._dynamo.graph_break()
            layer: Any = model.get_submodule(name)
            found.append(layer.weight.detach().norm() + x)
        return found

    torch.compile(norms, backend="fxshard", options=EAGER)(torch.ones(()))
    assert said(caplog) == []


@pytest.mark.slow
def test_says_nothing_in_explain(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    def loop(own: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x @ own.weight
        return x

    model = sharded(mesh, doing(loop))
    fxshard.explain(model, torch.randn(6, WIDTH), options=EAGER)
    assert said(caplog) == []
    train_compiled(model)
    assert len(said(caplog)) == 1
