"""Names do not depend on the wrappers around modules; they are torch's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import _get_fqns, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxshard
from fxshard.state.names import fqn_of, named_parameters
from tests.ranks import two_ranks
from tests.state.bodies import state_of
from tests.state.helpers import shared_folder
from tests.state.states import assert_same


class Inner(nn.Module):
    """Has a module called module, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Inner(), nn.Linear(4, 4), nn.BatchNorm1d(4))


def wrapped() -> nn.Sequential:
    model = plain()
    model[0] = checkpoint_wrapper(model[0])
    model[1] = compiled(model[1])
    return model


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    return optim


def under_ddp() -> nn.Module:
    return DistributedDataParallel(wrapped())


def compiled(model: nn.Module) -> nn.Module:
    module: Any = torch.compile(model, backend="eager")
    return module


def under_fsdp2() -> nn.Module:
    model: Any = wrapped()
    torch_fully_shard(model)
    return model


@two_ranks
def test_names_are_torchs() -> None:
    for model in (under_ddp(), under_fsdp2(), wrapped()):
        names = [name for name, _ in model.named_parameters()]
        assert [fqn_of(model, name) for name in names] == [next(iter(_get_fqns(model, name))) for name in names]
        assert [fqn for fqn, _ in named_parameters(model)] == [name for name, _ in plain().named_parameters()]
    assert fqn_of(under_ddp(), "module.0.module.weight") == fqn_of(under_ddp(), "0.module.weight") == "0.module.weight"


@two_ranks
def test_steps_into_several_wrappers_are_left_out() -> None:
    names = ["my_orig_mod.module.weight", "my_orig_mod.module.bias"]
    wraps: list[Callable[[nn.Module], nn.Module]] = [
        lambda model: compiled(DistributedDataParallel(model)),
        lambda model: DistributedDataParallel(compiled(model)),
        lambda model: compiled(DistributedDataParallel(compiled(model))),
    ]
    for wrap in wraps:
        for parent in ("", "0."):
            inner = nn.Sequential(OrderedDict(my_orig_mod=checkpoint_wrapper(Inner())))
            model = nn.Sequential(wrap(inner)) if parent else wrap(inner)
            expected = [parent + name for name in names]
            assert [fqn for fqn, _ in named_parameters(model)] == expected
            assert [next(iter(_get_fqns(model, name))) for name, _ in model.named_parameters()] == expected
            optim = torch.optim.AdamW(model.parameters())
            assert list(fxshard.full_state_dict(model, recipient_rank=None)) == [
                parent + "my_orig_mod._extra_state",
                *expected,
            ]
            state = fxshard.full_optim_state_dict(model, optim, recipient_rank=None, keys="fqn")
            assert state["param_groups"][0]["params"] == expected
            fxshard.load_full_state_dict(model, model.state_dict())
            with shared_folder() as folder:
                fxshard.save_checkpoint(folder / "a", model, optim)
                fxshard.load_checkpoint(folder / "a", model, optim)


@two_ranks
def test_state_of_wrapped_models_is_that_of_plain_ones() -> None:
    for model in (under_ddp(), under_fsdp2()):
        optim = stepped(model)
        state = fxshard.full_optim_state_dict(model, optim, keys="fqn", recipient_rank=None)
        assert list(state["state"]) == list(get_optimizer_state_dict(model, optim)["state"])
        weights = fxshard.full_state_dict(model, recipient_rank=None)
        assert list(weights) == list(plain().state_dict())
        weights["0._extra_state"] = 3
        fxshard.load_full_state_dict(model, weights)
        assert_same(fxshard.full_state_dict(model, recipient_rank=None), weights)
        fxshard.load_full_optim_state_dict(model, optim, state)
        other = plain()
        other_optim = torch.optim.AdamW(other.parameters())
        with shared_folder() as folder:
            fxshard.save_checkpoint(folder / "a", model, optim)
            fxshard.load_checkpoint(folder / "a", other, other_optim)
            found = state_of(other, other_optim)
            fxshard.load_checkpoint(folder / "a", model, optim)
        assert_same(found["model"], dict(weights))
        assert_same(found["state"], state["state"])
