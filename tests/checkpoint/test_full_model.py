"""The full state of a sharded model is the state_dict of the unsharded module, in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from tests.checkpoint.states import adamw, assert_same, net, sharded, take_steps
from tests.ranks import two_ranks


def on_first(value: Any) -> Any:
    return value if dist.get_rank() == 0 else {}


@two_ranks
@pytest.mark.parametrize("recipient", [0, 1, None])
def test_is_the_state_dict_of_the_unsharded_module(recipient: int | None) -> None:
    plain = net()
    state = fxshard.full_state_dict(sharded(net()), recipient_rank=recipient)
    if recipient not in (None, dist.get_rank()):
        assert state == {}
        return
    assert_same(state, plain.state_dict())
    assert state["head.weight"] is state["embedding.weight"]
    assert vars(state)["_metadata"] == vars(plain.state_dict())["_metadata"]
    net(seed=1).load_state_dict(state)


@two_ranks
@pytest.mark.parametrize("on_every_rank", [False, True])
def test_a_checkpoint_of_the_unsharded_module_loads(on_every_rank: bool) -> None:
    plain = net(seed=1)
    plain.norm.running_mean += torch.arange(8)
    model = sharded(net())
    take_steps(model, adamw(model))
    state = plain.state_dict()
    fxshard.load_full_state_dict(model, state if on_every_rank else on_first(state))
    assert_same(fxshard.full_state_dict(model), on_first(plain.state_dict()))
    tokens = torch.arange(6)
    assert model.eval()(tokens).equal(plain.eval()(tokens))


@two_ranks
def test_a_gather_of_the_old_values_is_not_used() -> None:
    model: Any = sharded(net())
    plain = net(seed=1)
    tokens = torch.arange(6)
    compiled: Any = torch.compile(model.eval(), backend="fxshard", options={"lower": "eager"})
    compiled(tokens)
    model.unshard()
    fxshard.load_full_state_dict(compiled, on_first(plain.state_dict()))
    with pytest.raises(fxshard.UnsupportedGraph, match="were changed after their gather was launched"):
        compiled(tokens)
    model.reset_iter_state()
    assert torch.allclose(compiled(tokens), plain.eval()(tokens))


@two_ranks
def test_names_are_those_without_compile() -> None:
    model = sharded(net())
    model.blocks[0] = torch.compile(model.blocks[0], backend="fxshard")
    state = fxshard.full_state_dict(model)
    assert_same(state, on_first(net().state_dict()))
    fxshard.load_full_state_dict(model, on_first(net(seed=1).state_dict()))
    assert_same(fxshard.full_state_dict(model), on_first(net(seed=1).state_dict()))


class WithExtraState(nn.Linear):
    """Saves more than its tensors."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@two_ranks
@pytest.mark.parametrize("extra", [{"seen": [1, 2]}, torch.arange(3)], ids=["dict", "tensor"])
def test_extra_state_travels(extra: dict[str, Any] | Tensor) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(WithExtraState(3, 5), nn.BatchNorm1d(5))
    model[0].extra = extra
    expected = model.state_dict()
    fxshard.fully_shard(model)
    state = fxshard.full_state_dict(model)
    assert_same(state, on_first(expected))
    model[0].extra = torch.zeros(0) if isinstance(extra, Tensor) else None
    fxshard.load_full_state_dict(model, state)
    assert_same(model[0].extra, extra)


@two_ranks
def test_mixed_dtypes_and_buffers_that_are_not_contiguous() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Module()
        dtypes = torch.float32, torch.bfloat16, torch.float64, torch.float16
        model.weights = nn.ParameterList(nn.Parameter(torch.randn(3 + i, 5).to(d)) for i, d in enumerate(dtypes))
        model.register_buffer("grid", torch.arange(12.0).view(3, 4).t())
        model.register_buffer("mask", torch.tensor([True, False]))
        model.register_buffer("empty", torch.zeros(0, 4))
        return model

    model, plain = build(), build()
    fxshard.fully_shard(model, mesh=None)
    before = fxshard.full_state_dict(model)
    assert_same(before, on_first(plain.state_dict()))
    for p in [*model.parameters(), *model.buffers()]:
        p.detach().zero_()
    fxshard.load_full_state_dict(model, before)
    assert_same(fxshard.full_state_dict(model), before)


def test_works_on_one_rank_without_a_process_group() -> None:
    model = net()
    state = fxshard.full_state_dict(model)
    assert_same(state, model.state_dict())
    other = net(seed=1)
    fxshard.load_full_state_dict(other, state)
    assert_same(other.state_dict(), model.state_dict())
