"""Reductions that are on the link when their graph ends: same bits, who sees them when, and backwards that fail."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fxshard import MixedPrecisionPolicy
from fxshard.sharding.sharded_module import ShardedModule, units_under
from fxshard.testing import EmulatedLink
from tests.pairwise import slow
from tests.runtime.blocks import Blocks, block_by_block, issued, sharded, step, warm

LOWERS = pytest.mark.parametrize("lower", ["eager", slow("inductor")])


def late(model: nn.Module) -> int:
    """How many reductions are late now."""
    return len(units_under(model)[0].model.late)


def pair_of(link: EmulatedLink, kind: type[Blocks], **options: Any) -> tuple[Blocks, Blocks]:
    """A model, and one whose graphs wait for everything themselves."""
    return block_by_block(link, kind, **options), block_by_block(link, kind, **options | {"streams": "off"})


def pair(link: EmulatedLink, **options: Any) -> tuple[Blocks, Blocks]:
    """The model, and one whose graphs wait for everything themselves."""
    return pair_of(link, Blocks, **options)


def local_grads(model: nn.Module) -> Tensor:
    grads = [cast(DTensor, p.grad).to_local().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads)


@LOWERS
def test_gradients_are_the_same_to_the_bit(link: EmulatedLink, lower: str) -> None:
    model, reference = pair(link, lower=lower)
    seen: list[int] = []
    model.blocks[0].register_full_backward_pre_hook(lambda *_: seen.append(late(model)))
    for _ in range(3):
        assert torch.equal(step(model), step(reference))
    assert (seen, late(model)) == ([2] * 3, 0)


@pytest.mark.slow
@LOWERS
def test_gradients_that_are_reduced_in_another_dtype_are_late_and_the_same_to_the_bit(
    link: EmulatedLink, lower: str
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, reference = sharded(link, mp_policy=policy), sharded(link, mp_policy=policy)
    for each, streams in ((model, "auto"), (reference, "off")):
        for block in each.blocks:
            block.compile(backend="fxshard", options={"lower": lower, "streams": streams})
    seen: list[int] = []
    model.blocks[0].register_full_backward_pre_hook(lambda *_: seen.append(late(model)))
    for _ in range(2):
        found, expected = step(model), step(reference)
        assert found.dtype is expected.dtype is torch.float32
        assert torch.equal(found, expected)
    assert (seen, late(model)) == ([2] * 2, 0)


class Called(Blocks):
    """Calls its blocks in any order, and some of them again."""

    order: tuple[int, ...] = ()
    checkpoints: bool = False

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            block = self.blocks[i]
            x = cast(Tensor, checkpoint(block, x, use_reentrant=True)) if self.checkpoints else block(x)
        return x


@pytest.mark.parametrize("max_buffers", [1, slow(2)])
@pytest.mark.parametrize("order", [(0, 1, 2, 0), (0, 0, 0), slow((0, 1, 0, 1, 0)), slow((1, 2, 3, 3))])
@pytest.mark.parametrize("checkpoints", [False, slow(True)])
def test_a_block_may_be_called_at_several_places(
    link: EmulatedLink, order: tuple[int, ...], max_buffers: int, checkpoints: bool
) -> None:
    models = pair_of(link, Called, reduce_scatter_max_input_buffers=max_buffers)
    grads = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for model in models:
            cast(Called, model).order, cast(Called, model).checkpoints = order, checkpoints
            torch.manual_seed(1)
            model(torch.randn(3, 4, requires_grad=True)).square().sum().backward()
            grads.append(local_grads(model))
    assert torch.equal(*grads)
    assert [late(model) for model in models] == [0, 0]


@pytest.mark.slow
@LOWERS
@pytest.mark.parametrize("first_synced", [0, 2])
def test_several_backwards_add_up(link: EmulatedLink, lower: str, first_synced: int) -> None:
    """Each one reduced, or the last one alone."""
    models = pair(link, lower=lower)
    for model in models:
        for seed in range(3):
            torch.manual_seed(seed)
            cast(ShardedModule, model).set_requires_gradient_sync(seed >= first_synced)
            model(torch.randn(3, 4)).square().sum().backward()
    assert torch.equal(*map(local_grads, models))


@pytest.mark.parametrize(
    ("max_buffers", "expected"),
    [
        (1, "ag3 ag2 w3 c rs3 w3 ag1 w2 c rs2 w2 ag0 w1 c rs1 w1 w0 c rs0 w0"),
        (3, "ag3 ag2 w3 c rs3 ag1 w2 c rs2 ag0 w1 c rs1 w3 w0 c rs0 w2 w1 w0"),
    ],
)
def test_no_more_are_late_than_may_be_in_flight(link: EmulatedLink, max_buffers: int, expected: str) -> None:
    _, backward = issued(warm(block_by_block(link, reduce_scatter_max_input_buffers=max_buffers)))
    assert backward == expected


def test_a_reduction_outside_of_graphs_runs_beside_the_next_module(link: EmulatedLink) -> None:
    model, reference = sharded(link), sharded(link)
    for parameter in reference.parameters():
        parameter.register_hook(lambda grad: None)  # it must see its gradient at once
    for _ in range(2):
        assert torch.equal(step(model), step(reference))
    assert issued(model)[1] == "c rs3 c rs2 c w3 rs1 c w2 rs0 w1 w0"
    assert issued(reference)[1] == "c rs3 w3 c rs2 w2 c rs1 w1 c rs0 w0"
    assert late(model) == 0


def _with_tensor_hook(model: Blocks, seen: list[Tensor]) -> None:
    next(iter(model.blocks[2].parameters())).register_hook(lambda grad: seen.append(grad.to_local().clone()))


def _with_post_hook(model: Blocks, seen: list[Tensor]) -> None:
    def keep(parameter: Tensor) -> None:
        seen.append(cast(DTensor, parameter.grad).to_local().clone())

    next(iter(model.blocks[2].parameters())).register_post_accumulate_grad_hook(keep)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("register", [_with_tensor_hook, _with_post_hook])
def test_hooks_of_parameters_run_when_their_block_ends(
    link: EmulatedLink, register: Callable[[Blocks, list[Tensor]], None]
) -> None:
    model, reference = pair(link)
    seen: list[Tensor] = []
    places: list[int] = []
    register(model, seen)
    model.blocks[1].register_full_backward_pre_hook(lambda *_: places.append(len(seen)))
    assert torch.equal(step(model), step(reference))
    grad = cast(DTensor, next(iter(reference.blocks[2].parameters())).grad)
    assert torch.equal(seen[0], grad.to_local())
    assert places == [1]  # before the backward of the block before it begins


@pytest.mark.slow
def test_a_backward_that_fails_leaves_nothing_to_the_next_step(link: EmulatedLink) -> None:
    model, reference = pair(link)
    gc.collect()  # what other tests have left
    expected, waiting = step(reference), _get_work_registry_size()
    fails = [True]

    def fail(*_: Any) -> None:
        if fails[0]:
            raise KeyboardInterrupt

    model.blocks[1].register_full_backward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        step(model)
    assert late(model) > 0
    fails[0] = False
    model.zero_grad()
    assert torch.equal(step(model), expected)
    assert (late(model), _get_work_registry_size()) == (0, waiting)


def test_reset_iter_state_and_the_end_of_a_model_wait_for_what_is_left(link: EmulatedLink) -> None:
    gc.collect()  # what other tests have left
    waiting = _get_work_registry_size()
    for ends in ("reset", "deleted"):
        model = block_by_block(link)
        model.blocks[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model)
        assert _get_work_registry_size() > waiting
        if ends == "reset":
            cast(ShardedModule, model).reset_iter_state()
        else:
            del model
            torch._dynamo.reset()
            gc.collect()
        assert _get_work_registry_size() == waiting


def test_a_block_that_is_frozen_after_forward_gets_none(link: EmulatedLink) -> None:
    model = warm(block_by_block(link))
    model.zero_grad()
    loss = model(torch.ones(3, 4)).square().sum()
    for parameter in model.blocks[3].parameters():
        parameter.requires_grad_(False)
    loss.backward()
    assert [p.grad is None for p in model.blocks[3].parameters()] == [True] * 4
    assert all(p.grad is not None for p in model.blocks[2].parameters())


@LOWERS
def test_a_backward_for_some_inputs_gives_parameters_none(link: EmulatedLink, lower: str) -> None:
    model = warm(block_by_block(link, lower=lower))
    model.zero_grad()
    x = torch.ones(3, 4, requires_grad=True)
    model(x).square().sum().backward(inputs=[x])
    assert x.grad is not None
    assert all(p.grad is None for p in model.parameters())
    assert late(model) == 0


@pytest.mark.slow
def test_an_optimizer_that_steps_in_a_hook_steps_all(link: EmulatedLink) -> None:
    """The parameter that gets its gradient last has the hook, in the block that is called first."""
    stepped = []
    for model in pair(link):
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        last = next(iter(model.blocks[0].parameters()))
        last.register_post_accumulate_grad_hook(lambda _, optim=optim: optim.step())
        step(model)
        stepped.append(torch.cat([cast(DTensor, p).to_local().detach().flatten() for p in model.parameters()]))
    assert torch.equal(*stepped)


def test_a_backward_of_an_earlier_forward_takes_nothing_of_one_that_failed(link: EmulatedLink) -> None:
    grads = []
    for model in pair(link):
        loss = model(torch.ones(3, 4)).square().sum()
        hidden = torch.ones(3, 4, requires_grad=True)
        hidden.register_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.blocks[3](model.blocks[2](hidden)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).zero_grad()
        loss.backward()
        grads.append(local_grads(model))
    assert torch.equal(*grads)
