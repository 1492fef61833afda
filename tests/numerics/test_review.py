"""Ways in which a model could silently train wrongly; each was once possible."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxshard
from tests.models import Doing
from tests.numerics.harness import EAGER, compile_module, full
from tests.pairwise import slow
from tests.ranks import two_ranks


class LoopWithBreak(nn.Module):
    """A graph break inside a loop: Dynamo gives up the whole frame and captures nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def recurrent() -> nn.Module:
    return Doing(lambda m, x: m.head(m.lstm(x)[0]), lstm=nn.LSTM(4, 4), head=nn.Linear(4, 2))


class CalledAroundACheckpoint(nn.Module):
    """One unit read before, inside and after a reentrant checkpoint: a backward inside of a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def inner(self, x: Tensor) -> Tensor:
        return checkpoint(lambda h: self.middle(h).tanh(), x, use_reentrant=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class ClampsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        return self.layer(x)


class AddsInPlace(nn.Module):
    """The only differentiable effect is a changed input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, total: Tensor, x: Tensor) -> None:
        total.add_(self.layer(x))


def same_as_plain(build: Callable[[], nn.Module], forward: Callable[[nn.Module], Tensor], *, compiled: bool) -> None:
    """One backward of a sharded model gives the gradients of a plain one; all ranks see the same batch."""
    plain = build().double()
    model = fxshard.fully_shard(copy.deepcopy(plain))
    forward(plain).backward()
    forward(compile_module(model, options=EAGER) if compiled else model).backward()
    for (name, expected), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(full(parameter.grad), expected.grad, msg=name)


def batch(rows: int = 3) -> Tensor:
    return torch.arange(rows * 4, dtype=torch.float64).view(rows, 4).sin()


def train_once(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    model(batch().float()).sum().backward()
    optim.step()


@two_ranks
@pytest.mark.parametrize("model", [LoopWithBreak, recurrent])
def test_refuses_to_step_a_compiled_model_of_which_nothing_was_captured(model: Callable[[], nn.Module]) -> None:
    compiled = compile_module(model(), options=EAGER)
    optim = torch.optim.SGD(compiled.parameters(), lr=0.1)

    with pytest.raises(fxshard.ConfigError, match=r"(?s)(not sharded: .*weight|holds only its part).*fully_shard"):
        train_once(compiled, optim)


class Disabled(nn.Linear):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_refuses_it_where_a_launcher_started_ranks_that_have_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Sequential(nn.Linear(4, 4), Disabled(4, 4), nn.Linear(4, 4))  # Dynamo skips the loop over them
    compiled = compile_module(model, options=EAGER)
    optim = torch.optim.SGD(compiled.parameters(), lr=0.1)
    with pytest.raises(fxshard.ConfigError, match=r"(?s)not sharded: 0.weight.*fully_shard.*init_process_group"):
        train_once(compiled, optim)


@two_ranks
@pytest.mark.parametrize("compiled", [False, True])
def test_keeps_gradients_announced_around_a_nested_backward(compiled: bool) -> None:
    same_as_plain(CalledAroundACheckpoint, lambda m: m(batch().requires_grad_()).sum(), compiled=compiled)


def added(model: nn.Module) -> Tensor:
    total = torch.zeros(3, 4, dtype=torch.float64) * torch.ones(1, dtype=torch.float64).requires_grad_()
    model(total, batch())
    return total.sum()


@two_ranks
def test_gives_gradients_through_an_input_that_was_changed_in_place() -> None:
    same_as_plain(AddsInPlace, added, compiled=True)


@two_ranks
@pytest.mark.parametrize("compiled", [False, True])
def test_refuses_a_forward_that_writes_into_a_parameter(compiled: bool) -> None:
    model = fxshard.fully_shard(ClampsItself())
    run = compile_module(model, options=EAGER) if compiled else model
    with pytest.raises(fxshard.UnsupportedGraph, match="changed in place"):
        run(batch().float())


@two_ranks
def test_weights_that_are_swapped_in_and_back_leave_the_first_ones_as_they_were() -> None:
    model = fxshard.fully_shard(nn.Linear(4, 4))
    first = model.weight
    values = full(first).clone()
    model.weight = nn.Parameter(first.detach() * 0.5)
    model(batch().float())
    model.weight = first
    model(batch().float())
    torch.testing.assert_close(full(model.weight), values, rtol=0, atol=0)


@two_ranks
def test_refuses_models_of_different_shapes_on_different_ranks() -> None:
    compiled = compile_module(nn.Linear(4, 4 + dist.get_rank()), options=EAGER)
    with pytest.raises(fxshard.ConfigError, match=r"the ranks' models differ: .*weight: torch.float32\[\d, 4\]"):
        compiled(batch().float())


@two_ranks
@pytest.mark.parametrize("expand", [slow(False), True])
def test_broadcasts_strided_and_expanded_tensors_whole(expand: bool) -> None:
    model = nn.Linear(4, 4)
    torch.manual_seed(dist.get_rank())
    model.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    model.register_buffer("scale", torch.randn(1).expand(40) if expand else torch.randn(40))
    weight, scale = model.weight.detach().clone(), model.get_buffer("scale").clone()
    for values in (weight, scale):
        dist.broadcast(values, src=0)
    compile_module(model, options=EAGER)(batch().float())
    torch.testing.assert_close(full(model.weight), weight, rtol=0, atol=0)
    torch.testing.assert_close(model.get_buffer("scale"), scale, rtol=0, atol=0)


@pytest.mark.slow
@two_ranks
def test_a_torch_module_as_root_follows_requires_grad() -> None:
    model = fxshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    compiled = compile_module(model, options=EAGER)
    step = partial(compiled, batch().float())
    step().sum().backward()
    model[0].requires_grad_(False)
    model.zero_grad()
    step().sum().backward()
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]


def normed() -> Any:
    """A block with buffers that forward writes, and that backward runs again."""
    block, head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2)
    return Doing(lambda m, x: m.head(checkpoint(m.block, x, use_reentrant=False)), block=block, head=head).double()


@two_ranks
@pytest.mark.parametrize("by_block", [False, True])
def test_a_checkpointed_block_writes_its_buffers_as_often_as_torchs_compilation(by_block: bool) -> None:
    """Once in a whole graph; by blocks once more when backward runs it again."""
    torch._dynamo.reset()
    plain, model = normed(), fxshard.fully_shard(normed())
    fxshard.load_full_state_dict(model, plain.state_dict())
    runs: list[Any] = []
    for each, how in ((plain, {"backend": "aot_eager"}), (model, {"backend": "fxshard", "options": EAGER})):
        if by_block:
            each.block.compile(**how)
        runs.append(each if by_block else cast(Any, torch.compile)(each, **how))
    for _ in range(2):
        for run in runs:
            run(batch()).square().mean().backward()
    for (name, expected), buffer in zip(plain.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, msg=name)
