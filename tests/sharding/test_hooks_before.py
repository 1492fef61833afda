"""What is said of the whole gradients of parameters before they are sharded is refused by name: hooks, a dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from fxshard import fully_shard
from fxshard.errors import ConfigError
from tests.numerics.harness import EAGER, compile_module, loss_on_ones
from tests.numerics.models import MLP
from tests.ranks import two_ranks

Register = Callable[[Any], RemovableHandle]


def hook(parameter: Any) -> Any:
    return parameter.register_hook(torch.zeros_like)


def post_hook(parameter: Any) -> Any:
    return parameter.register_post_accumulate_grad_hook(lambda p: None)


def multi_hook(parameter: Any) -> Any:
    return register_multi_grad_hook([parameter], lambda grads: None)


@pytest.mark.parametrize("register", [hook, post_hook, multi_hook])
def test_refuses_hooks_from_before(mesh: DeviceMesh, register: Register) -> None:
    model = MLP()
    handle = register(model.head.weight)
    with pytest.raises(ConfigError, match=r"(?s)hooks from before .*: head\.weight\. .*after fully_shard.*a DTensor"):
        fully_shard(model, mesh=mesh)
    handle.remove()
    fully_shard(model, mesh=mesh)
    loss_on_ones(model).backward()


def test_leaves_the_hooks_of_ignored_parameters(mesh: DeviceMesh) -> None:
    model, seen = MLP(), list[Tensor]()
    model.head.weight.register_hook(seen.append)
    fully_shard(model, mesh=mesh, ignored_params={cast(nn.Parameter, model.head.weight)})
    loss_on_ones(model).backward()
    assert len(seen) == 1


@two_ranks
@pytest.mark.parametrize("register", [hook, post_hook])
def test_the_one_line_form_refuses_them_at_the_first_call(register: Register) -> None:
    model = MLP()
    register(model.head.weight)
    with pytest.raises(ConfigError, match=r"(?s)hooks from before .*head\.weight"):
        loss_on_ones(compile_module(model, EAGER))
