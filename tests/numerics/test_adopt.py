"""Models that FSDP2 has sharded and fxshard takes over, and gives back: they train as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method

import fxshard
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    Prepare,
    Run,
    Tools,
    blocks_of,
    check,
    check_bitwise,
    check_close,
    check_inductor,
    compile_module,
    only_shard,
    shard_blocks,
    shard_blocks_as_one_unit,
    squared_error,
    update,
    world_mesh,
)
from tests.numerics.models import GPT, MLP, WIDTH, tokens
from tests.numerics.scenarios import BF16, LANGUAGE, ONE_BLOCK, REGRESSION
from tests.pairwise import slow
from tests.ranks import two_ranks


def by_fsdp2(tools: Tools) -> Tools:
    return Tools(system=FSDP2, scenario=tools.scenario)


def then_adopted(prepare: Prepare) -> Prepare:
    """Let FSDP2 shard as `prepare` says, and take over what came of it."""

    def made(model: nn.Module, tools: Tools) -> nn.Module:
        if not tools.system.ours:
            return prepare(model, tools)
        return tools.compile(fxshard.adopt(prepare(model, by_fsdp2(tools))))

    return made


def head_ignored(model: nn.Module, tools: Tools) -> nn.Module:
    if tools.system.fully_shard is not None:
        head = model.get_submodule("head").requires_grad_(False)
        for block in blocks_of(model):
            tools.shard(block)
        tools.shard(model, ignored_params=set(head.parameters()))
    return model


def some_frozen(model: nn.Module, tools: Tools) -> nn.Module:
    model.get_submodule("blocks.0.up").requires_grad_(False)
    return only_shard(model, tools)


def blocks_alone(model: nn.Module, tools: Tools) -> nn.Module:
    """Leave the root to none: what is sharded inside of it is taken over."""
    for module in (*blocks_of(model), model.get_submodule("head")):
        tools.shard(module)
    return model


def prefetching(model: nn.Module, tools: Tools) -> nn.Module:
    shard_blocks(model, tools)
    if tools.system.fully_shard is not None:
        blocks: list[Any] = list(blocks_of(model))
        first, second = blocks
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    return model


class Recurrent(nn.Module):
    """Keeps its weights in a list beside `_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.unsqueeze(0))[0][0])


PREPARED = {
    "per block": (MLP, only_shard),
    "blocks in one unit": (MLP, shard_blocks_as_one_unit),
    "frozen": (MLP, some_frozen),
    "no root": (MLP, blocks_alone),
    "prefetch lists": (MLP, prefetching),
    "RNN": (Recurrent, lambda model, tools: (tools.shard(model.rnn), only_shard(model, tools))[1]),
}


DEFAULT = ("blocks in one unit", "no root", "prefetch lists")


@two_ranks
@pytest.mark.parametrize("case", [case if case in DEFAULT else slow(case) for case in PREPARED])
def test_an_adopted_model_trains_like_fsdp2(case: str) -> None:
    model, prepare = PREPARED[case]
    check(replace(REGRESSION, model=model, prepare=then_adopted(prepare)))


@two_ranks
def test_an_adopted_model_keeps_ignored_parameters_whole() -> None:
    check_bitwise(replace(ONE_BLOCK, prepare=then_adopted(head_ignored)))


@two_ranks
@pytest.mark.parametrize("kwargs", [{"mp_policy": BF16}, slow({"reshard_after_forward": False})])
def test_an_adopted_gpt_with_a_tied_head_trains_like_fsdp2(kwargs: dict[str, Any]) -> None:
    model = partial(GPT, num_blocks=1)
    check_bitwise(
        replace(LANGUAGE, model=model, prepare=then_adopted(only_shard), shard_kwargs=kwargs, cast_model=False)
    )


@two_ranks
@pytest.mark.slow
def test_an_adopted_model_without_a_compile_trains_like_fsdp2() -> None:
    def prepare(model: nn.Module, tools: Tools) -> nn.Module:
        if not tools.system.ours:
            return only_shard(model, tools)
        return fxshard.adopt(only_shard(model, by_fsdp2(tools)))

    check(replace(REGRESSION, prepare=prepare))


@two_ranks
@pytest.mark.slow
def test_an_adopted_model_lowered_by_inductor_trains_like_fsdp2() -> None:
    check_inductor(replace(REGRESSION, prepare=then_adopted(only_shard)))


def clipped(run: Run) -> None:
    total = nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.extra.append(getattr(total, "full_tensor", lambda: total)().detach().clone())
    update(run)


def compiled_blocks(model: nn.Module, tools: Tools) -> nn.Module:
    """Start as an FSDP2 user would, also where the system is ours."""
    tools = by_fsdp2(tools) if tools.system.ours else tools
    shard_blocks(model, tools)
    if tools.system.fully_shard is not None:
        for block in blocks_of(model):
            block.compile(backend="eager")
    return model


def at_step(step: int, change: Callable[[nn.Module], nn.Module]) -> Callable[[Run, int], None]:
    def before_step(run: Run, now: int) -> None:
        if now == step and run.system.ours:
            run.model = change(run.model)

    return before_step


def adopted_and_compiled(model: nn.Module) -> nn.Module:
    return compile_module(fxshard.adopt(model), options=EAGER)


@two_ranks
def test_an_fsdp2_run_goes_on_with_its_optimizer_after_adopt() -> None:
    """Also where blocks were compiled, and the optimizer has made its state."""
    before_step = at_step(2, adopted_and_compiled)
    check(replace(ONE_BLOCK, prepare=compiled_blocks, before_step=before_step, update=clipped))


@two_ranks
def test_a_run_goes_on_with_its_optimizer_after_release() -> None:
    check(replace(REGRESSION, before_step=at_step(2, fxshard.release), update=clipped))


@pytest.mark.slow
@two_ranks
def test_a_run_goes_there_and_back_and_there() -> None:
    def change(run: Run, step: int) -> None:
        if run.system.ours and step:
            run.model = fxshard.release(run.model) if step % 2 else adopted_and_compiled(run.model)

    check(replace(REGRESSION, prepare=then_adopted(prefetching), before_step=change))


@two_ranks
def test_gradients_that_are_there_stay() -> None:
    """Adopt between two microbatches, of which each is reduced: the second adds to what FSDP2 left."""

    def backward(run: Run, step: int) -> Tensor:
        first = run.scenario.loss(run.model, *(x[:2] for x in run.batch(step)))
        first.backward()
        if run.system.ours:
            run.model = adopted_and_compiled(run.model) if step % 2 == 0 else fxshard.release(run.model)
        second = run.scenario.loss(run.model, *(x[2:] for x in run.batch(step)))
        second.backward()
        return second

    check_bitwise(replace(ONE_BLOCK, prepare=compiled_blocks, backward=backward))


@two_ranks
def test_release_gives_whole_parameters_back() -> None:
    torch.manual_seed(0)
    model = GPT()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for block in model.blocks:
        fsdp2_fully_shard(block, mesh=world_mesh())
    fsdp2_fully_shard(model, mesh=world_mesh())
    compiled = adopted_and_compiled(model)
    compiled(tokens()(0, 0)[0]).sum().backward()
    back = fxshard.release(compiled, whole=True)
    assert back is model
    assert type(back) is GPT
    found = dict(back.named_parameters())
    assert found.keys() == before.keys()
    assert all(type(p) is nn.Parameter and torch.equal(p, before[name]) for name, p in found.items())
    back(tokens()(0, 0)[0]).sum().backward()
    assert all(p.grad is not None for p in back.parameters())


class WithEncode(MLP):
    """Has a second entry."""

    def encode(self, x: Tensor) -> Tensor:
        return x @ self.head.weight


def encoded_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return squared_error(model, x, y) + model.encode(x).square().mean()  # type: ignore[operator]


@two_ranks
@pytest.mark.parametrize("adopted", [True, slow(False)])
def test_a_registered_method_trains_like_fsdp2s(adopted: bool) -> None:
    def prepare(model: nn.Module, tools: Tools) -> nn.Module:
        ours = tools.system.ours and not adopted
        only_shard(model, tools if ours else by_fsdp2(tools) if tools.system.ours else tools)
        if tools.system.fully_shard is None:
            return model
        (fxshard.register_fsdp_forward_method if ours else register_fsdp_forward_method)(model, "encode")
        if tools.system.ours and adopted:
            fxshard.adopt(model)
        return tools.compile(model)

    check_close(replace(REGRESSION, model=WithEncode, loss=encoded_error, prepare=prepare))
