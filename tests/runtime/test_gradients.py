"""The gradient of a flat becomes the gradients of its parameters, as autograd would have left them."""

from __future__ import annotations

import gc
import sys
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard import fully_shard
from fxshard.errors import InvariantError
from fxshard.runtime.flat_shard import FlatShard
from fxshard.sharding.sharded_module import units_under

WEIGHT, BIAS = 0, 1


@pytest.fixture
def shard(mesh: DeviceMesh) -> FlatShard:
    """The shard of rank 0 of 2: 3 of 5 rows of the weight, `[9]`, and 3 of 5 elements of the bias."""
    layer = nn.Linear(3, 5)
    fully_shard(layer, mesh=mesh)
    (unit,) = units_under(layer)
    (shard,) = unit.shards
    return shard


def hand_over(shard: FlatShard, grad: Tensor, *slots: int) -> None:
    """What a backward does: it announces its gradients, and autograd accumulates that of the flat."""
    shard.sink.expect(slots)
    shard.flat.grad = grad
    shard.sink.hand_over(shard.flat)


def local_grad(shard: FlatShard, slot: int) -> Tensor:
    grad = cast(DTensor, shard.members[slot].parameter.grad)
    return grad.to_local()


def test_gives_each_parameter_its_slice_without_a_copy(shard: FlatShard) -> None:
    grad = torch.arange(12.0)
    hand_over(shard, grad, WEIGHT, BIAS)
    assert local_grad(shard, WEIGHT).tolist() == grad[:9].view(3, 3).tolist()
    assert local_grad(shard, BIAS).data_ptr() == grad[9:].data_ptr()


def test_leaves_the_flat_without_a_gradient(shard: FlatShard) -> None:
    hand_over(shard, torch.ones(12), WEIGHT, BIAS)
    assert shard.flat.grad is None


def test_gives_nothing_to_a_parameter_that_took_no_part(shard: FlatShard) -> None:
    hand_over(shard, torch.ones(12), BIAS)
    assert shard.members[WEIGHT].parameter.grad is None
    assert local_grad(shard, BIAS).tolist() == [1.0] * 3


def test_adds_to_a_gradient_that_is_there(shard: FlatShard) -> None:
    hand_over(shard, torch.ones(12), WEIGHT, BIAS)
    hand_over(shard, torch.full((12,), 2.0), BIAS)
    assert local_grad(shard, WEIGHT).flatten().tolist() == [1.0] * 9
    assert local_grad(shard, BIAS).tolist() == [3.0] * 3


def test_adds_what_was_reduced_separately(shard: FlatShard) -> None:
    for _ in range(2):
        shard.sink.keep(torch.ones(12))
    hand_over(shard, torch.full((12,), 2.0), WEIGHT, BIAS)
    hand_over(shard, torch.full((12,), 3.0), BIAS)
    assert local_grad(shard, WEIGHT).flatten().tolist() == [4.0] * 9
    assert local_grad(shard, BIAS).tolist() == [7.0] * 3


def test_forgets_what_was_reduced_separately_for_a_backward_that_never_ended(shard: FlatShard) -> None:
    shard.sink.keep(torch.ones(12))
    shard.sink.forget()
    hand_over(shard, torch.full((12,), 2.0), BIAS)
    assert local_grad(shard, BIAS).tolist() == [2.0] * 3


def test_adds_where_only_some_have_a_gradient(shard: FlatShard) -> None:
    hand_over(shard, torch.ones(12), BIAS)
    hand_over(shard, torch.full((12,), 2.0), WEIGHT, BIAS)
    assert local_grad(shard, WEIGHT).flatten().tolist() == [2.0] * 9
    assert local_grad(shard, BIAS).tolist() == [3.0] * 3


def test_adds_in_place_and_says_so(shard: FlatShard) -> None:
    hand_over(shard, torch.ones(12), WEIGHT, BIAS)
    grads = [member.parameter.grad for member in shard.members]
    versions = [cast(Tensor, grad)._version for grad in grads]
    hand_over(shard, torch.ones(12), WEIGHT, BIAS)
    assert all(member.parameter.grad is grad for member, grad in zip(shard.members, grads, strict=True))
    assert all(cast(Tensor, grad)._version > version for grad, version in zip(grads, versions, strict=True))


def test_adds_to_a_gradient_that_a_user_put_there(shard: FlatShard) -> None:
    parameter = cast(DTensor, shard.members[BIAS].parameter)
    mesh, placements = parameter.device_mesh, parameter.placements
    parameter.grad = DTensor.from_local(torch.ones(3), mesh, placements, shape=torch.Size([5]), stride=(1,))
    hand_over(shard, torch.ones(12), BIAS)
    assert local_grad(shard, BIAS).tolist() == [2.0] * 3


def test_leaves_the_gradients_of_the_last_step_to_who_holds_them(shard: FlatShard) -> None:
    hand_over(shard, torch.ones(12), WEIGHT, BIAS)
    held = cast(DTensor, shard.members[WEIGHT].parameter.grad)
    shard.members[WEIGHT].parameter.grad = None
    hand_over(shard, torch.zeros(12), WEIGHT, BIAS)
    assert held.to_local().flatten().tolist() == [1.0] * 9


def test_slices_a_gradient_that_begins_inside_its_storage(shard: FlatShard) -> None:
    hand_over(shard, torch.arange(20.0)[4:16], WEIGHT, BIAS)
    assert local_grad(shard, BIAS).tolist() == [13.0, 14.0, 15.0]


@pytest.mark.parametrize("steps", [1, 2], ids=["first", "added"])
def test_calls_no_python_function_per_parameter(mesh: DeviceMesh, steps: int) -> None:
    few, many = (nn.ParameterList(torch.ones(4, 2) for _ in range(n)) for n in (2, 20))
    assert calls_in_the_last_hand_over(few, mesh, steps) == calls_in_the_last_hand_over(many, mesh, steps)


def calls_in_the_last_hand_over(parameters: nn.ParameterList, mesh: DeviceMesh, steps: int) -> int:
    model = nn.Module()
    model.parameters_ = parameters
    fully_shard(model, mesh=mesh)
    ((shard,),) = [unit.shards for unit in units_under(model)]
    calls = 0

    def count(frame: object, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    slots, grads = range(len(parameters)), torch.ones(steps, shard.plan.numel)
    gc.collect()
    gc.disable()  # what other tests left is finalised in Python
    try:
        for grad in grads:
            calls = 0
            sys.setprofile(count)
            hand_over(shard, grad, *slots)
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_runs_the_hooks_of_a_parameter_in_torchs_order(shard: FlatShard) -> None:
    parameter = shard.members[BIAS].parameter
    seen: list[str] = []
    parameter.register_hook(lambda grad: grad * 2)
    parameter.register_hook(lambda grad: seen.append("tensor hook"))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(f"accumulated {p.grad is not None}"))
    hand_over(shard, torch.ones(12), BIAS)
    assert local_grad(shard, BIAS).tolist() == [2.0] * 3
    assert seen == ["tensor hook", "accumulated True"]


def test_refuses_a_gradient_that_nobody_announced(shard: FlatShard) -> None:
    with pytest.raises(InvariantError, match=r"no forward announced, for the shard of weight, bias"):
        hand_over(shard, torch.ones(12))


def test_takes_an_announcement_once(shard: FlatShard) -> None:
    hand_over(shard, torch.ones(12), BIAS)
    with pytest.raises(InvariantError, match=r"no forward announced"):
        hand_over(shard, torch.ones(12))
