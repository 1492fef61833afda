"""Training over the emulated link: every system computes the step that one process computes by hand.

Peers are identical, so a gathered parameter is the rows of this rank, repeated; its gradient is the one of these rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

import fxshard
from fxshard.testing import EmulatedLink, emulated_link
from tests.models import FeedForward
from tests.pairwise import slow

W, WIDTH, LR = 4, 8, 0.1
OPS: Any = torch.ops._c10d_functional

Forward = Callable[[Tensor], Any]
System = Callable[[nn.Sequential, EmulatedLink], Forward]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Compiled code knows its group by name, and the names of the next link are the same."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def as_gathered(whole: Tensor) -> Tensor:
    """The rows of rank 0, from each of the ranks."""
    return torch.cat([whole.chunk(W)[0]] * W)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    found = nn.Sequential(*(FeedForward(WIDTH, 2 * WIDTH) for _ in range(2)), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(as_gathered(parameter))
    return found


def batch() -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))


def losses_by_hand(steps: int = 2) -> list[float]:
    module, losses = model(), []
    for _ in range(steps):
        loss = module(batch()).square().mean()
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(module.parameters(), grads, strict=True):
                parameter.sub_(LR * as_gathered(grad))
    return losses


def losses_of(system: System, steps: int = 2, **link_options: Any) -> tuple[list[float], list[str]]:
    """The losses, and the collectives of the steps."""
    with emulated_link(W, **link_options) as link:
        module, losses = model(), []
        forward = system(module, link)
        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        link.clear()
        for _ in range(steps):
            loss = forward(batch()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [transfer.op for transfer in link.transfers]


# ---- the systems


def fsdp2(module: nn.Sequential, link: EmulatedLink) -> Forward:
    for unit in (*module, module):
        fully_shard(unit, mesh=link.mesh)
    return module


def fsdp2_with_prefetch(module: nn.Sequential, link: EmulatedLink) -> Forward:
    fsdp2(module, link)
    sharded: Any = module
    sharded._set_unshard_async_op(True)
    for unit, following in itertools.pairwise(sharded):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    return module


class Gathered(nn.Module):
    def forward(self, parameter: Any) -> Any:
        return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def dtensor_parametrisation(module: nn.Sequential, link: EmulatedLink) -> Forward:
    for layer in [layer for layer in module.modules() if isinstance(layer, nn.Linear)]:
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), link.mesh, [Shard(0)])))
            parametrize.register_parametrization(layer, name, Gathered(), unsafe=True)
    return module


def compiled_with_fxshard(module: nn.Module, lower: str) -> Forward:
    return torch.compile(module, backend="fxshard", options={"lower": lower, "schedule": "fsdp2"})


def fxshard_after_fully_shard(lower: str) -> System:
    def prepare(module: nn.Sequential, link: EmulatedLink) -> Forward:
        for unit in (*module, module):
            fxshard.fully_shard(unit, mesh=link.mesh)
        return compiled_with_fxshard(module, lower)

    return prepare


def fxshard_in_one_line(module: nn.Sequential, link: EmulatedLink) -> Forward:
    compiled = compiled_with_fxshard(module, "eager")
    with torch.no_grad():
        compiled(batch())  # shards the model; the optimizer comes afterwards
    return compiled


SYSTEMS: dict[str, System] = {
    "fsdp2": fsdp2,
    "fsdp2_with_prefetch": fsdp2_with_prefetch,
    "dtensor_parametrisation": dtensor_parametrisation,
    "fxshard_eager": fxshard_after_fully_shard("eager"),
    "fxshard_in_one_line": fxshard_in_one_line,
}


@pytest.mark.parametrize("options", [{}, {"gigabytes_per_s": 1.0, "latency_us": 50.0}], ids=["instant", "timed"])
@pytest.mark.parametrize("system", [name if name != "fxshard_in_one_line" else slow(name) for name in SYSTEMS])
def test_steps_equal_the_ones_computed_by_hand(system: str, options: dict[str, Any]) -> None:
    losses, ops = losses_of(SYSTEMS[system], **options)
    torch.testing.assert_close(losses, losses_by_hand())
    assert set(ops) == {"all_gather", "reduce_scatter"}


@pytest.mark.slow
def test_inductor_steps_equal_the_ones_of_fsdp2_with_as_many_collectives() -> None:
    losses, ops = losses_of(fxshard_after_fully_shard("inductor"), gigabytes_per_s=1.0, latency_us=50.0)
    expected, expected_ops = losses_of(fsdp2)
    torch.testing.assert_close(losses, expected)
    assert sorted(ops) == sorted(expected_ops)


@pytest.mark.parametrize("options", [{}, {"latency_us": 50.0}], ids=["instant", "timed"])
def test_ddp_steps_equal_the_ones_without_it(options: dict[str, Any]) -> None:
    def ddp(module: nn.Sequential, link: EmulatedLink) -> Forward:
        return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.001)

    def local(module: nn.Sequential, link: EmulatedLink) -> Forward:
        return module

    losses, ops = losses_of(ddp, **options)
    torch.testing.assert_close(losses, losses_of(local)[0])
    assert ops.count("all_reduce") > 2  # of two steps: it has several buckets
    assert set(ops) == {"all_reduce", "broadcast"}  # once it broadcasts which buckets it has


@pytest.mark.parametrize("bucket", ["none", "all"])
def test_inductor_code_gathers_and_waits_bucketed_or_not(bucket: str) -> None:
    with emulated_link(W, gigabytes_per_s=1.0, latency_us=50.0) as link:
        assert dist.group.WORLD is not None
        name = dist.group.WORLD.group_name

        def gathered(x: Tensor, *shards: Tensor) -> Tensor:
            launched = [OPS.all_gather_into_tensor(shard, W, name) for shard in shards]
            for weight in launched:
                x = x @ OPS.wait_tensor(weight)
            return x

        shards = [torch.randn(2, W * 2, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
        x = torch.randn(5, W * 2)
        patches: Any = {"bucket_all_gathers_fx": bucket}
        compiled = torch.compile(gathered, fullgraph=True, options=patches)
        expected = x
        for shard in shards:
            expected = expected @ shard.repeat(W, 1)
        torch.testing.assert_close(compiled(x, *shards), expected)
        assert [t.op for t in link.transfers] == ["all_gather"] * (3 if bucket == "none" else 1)
        assert sum(t.bytes for t in link.transfers) == 3 * W * 2 * W * 2 * 4
