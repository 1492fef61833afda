"""`grad_dtype`: gradients are added up, reduced and kept in what the user has said, before sharding or after."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

import fxshard
from fxshard.errors import ConfigError
from tests.numerics.harness import EAGER, blocks_of, compile_module, full, world_mesh
from tests.numerics.models import MLP, WIDTH
from tests.pairwise import slow
from tests.ranks import two_ranks

Sharded = Callable[[nn.Module], nn.Module]


def one_line(model: nn.Module) -> nn.Module:
    return compile_module(model, EAGER)


def uncompiled(model: nn.Module) -> nn.Module:
    for module in (*blocks_of(model), model):
        fxshard.fully_shard(module, mesh=world_mesh())
    return model


def compiled(model: nn.Module) -> nn.Module:
    return compile_module(uncompiled(model), EAGER)


def through_inductor(model: nn.Module) -> nn.Module:
    return compile_module(uncompiled(model), {"lower": "inductor"})


def by_blocks(model: nn.Module) -> nn.Module:
    uncompiled(model)
    for block in blocks_of(model):
        block.compile(backend="fxshard", options=dict(EAGER))
    return model


def over_replicas(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return compile_module(fxshard.fully_shard(model, mesh=mesh), EAGER)


def set_it(model: nn.Module, names: str) -> None:
    for name, parameter in model.named_parameters():
        if names in name:
            parameter.grad_dtype = torch.float32


def loss(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    out: Tensor = model(x.bfloat16())
    return out.float().pow(2).mean()


@two_ranks
@pytest.mark.parametrize("names", ["", slow("weight")])
@pytest.mark.parametrize(
    ("shard", "after"),
    [
        (one_line, False),
        (compiled, False),
        (compiled, True),
        (uncompiled, False),
        slow(uncompiled, True),
        slow(by_blocks, False),
        slow(over_replicas, False),
        slow(through_inductor, True),
    ],
)
def test_sums_of_bf16_gradients_are_those_of_unsharded_training(shard: Sharded, after: bool, names: str) -> None:
    torch.manual_seed(0)
    plain, model = MLP().bfloat16(), MLP().bfloat16()
    model.load_state_dict(plain.state_dict())
    set_it(plain, names)
    if not after:
        set_it(model, names)
    run = shard(model)
    if after:
        set_it(model, names)
    for step in range(8):
        loss(plain, step).backward()
        loss(run, step).backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert found.grad.dtype is expected.grad.dtype
        if names in name:
            mean = expected.grad.double()
            dist.all_reduce(mean)
            # Inductor rounds less to bf16 within a backward.
            rtol, atol = (0.1, 1e-3) if shard is through_inductor else (1e-6, 1e-7)
            torch.testing.assert_close(full(found.grad).double(), mean / 2, rtol=rtol, atol=atol)


@two_ranks
@pytest.mark.parametrize("shard", [compiled, slow(uncompiled)])
def test_microbatches_are_added_up_and_stepped_with_in_it(shard: Sharded) -> None:
    torch.manual_seed(0)
    plain, model = MLP().bfloat16(), MLP().bfloat16()
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        set_it(each, "")
    run: Any = shard(model)
    ours, theirs = SGD(model.parameters(), lr=0.1), SGD(plain.parameters(), lr=0.1)
    for step in range(8):
        with fxshard.no_sync(run) if step % 4 < 3 else nullcontext():
            loss(run, step).backward()
        loss(plain, step).backward()
        if step % 4 < 3:
            continue
        for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
            assert expected.grad is not None
            assert found.grad is not None
            assert found.grad.dtype is torch.float32
            dist.all_reduce(expected.grad)
            expected.grad /= 2
            torch.testing.assert_close(full(found.grad), expected.grad, rtol=1e-6, atol=1e-7)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(found.detach()), expected.detach())


@two_ranks
def test_fsdp2_has_none() -> None:
    model = MLP().bfloat16()
    set_it(model, "weight")
    uncompiled(model)
    with pytest.raises(ConfigError, match=r"(?s)FSDP2 has no grad_dtype: .*weight \(torch\.float32\).*whole=True"):
        fxshard.release(model)
    whole = fxshard.release(model, whole=True)
    assert {p.grad_dtype for name, p in whole.named_parameters() if "weight" in name} == {torch.float32}


def test_explain_shows_it() -> None:
    model = MLP().bfloat16()
    set_it(model, "")
    explained = fxshard.explain(model, torch.ones(2, WIDTH).bfloat16(), world_size=4)
    shards = [shard for frame in explained.frames for unit in frame.plan.units.values() for shard in unit.shards]
    assert {shard.grad_dtype for shard in shards} == {torch.float32}
