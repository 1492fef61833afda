"""Who uses the emulated link on a GPU: FSDP2, Inductor's code and CUDA graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fxshard.testing import EmulatedLink, emulated_link
from tests.testing.link import OPS, TIMED_CUDA, W, group_name, small_numbers

pytestmark = pytest.mark.gpu


def trained(device: Any, **options: Any) -> tuple[list[float], list[str]]:
    """Losses of FSDP2 and the collectives of its steps."""
    with emulated_link(W, device=device, **options) as link:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
        x = torch.randn(8, 32)
        model, x = model.to(device), x.to(device)
        for unit in (*model, model):
            fully_shard(unit, mesh=link.mesh)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        link.clear()
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [transfer.op for transfer in link.transfers]


@pytest.mark.parametrize("options", [{}, TIMED_CUDA], ids=["instant", "timed"])
def test_fsdp2_trains_as_over_the_link_of_the_cpu(options: dict[str, Any]) -> None:
    losses, ops = trained("cuda", **options)
    expected, expected_ops = trained("cpu")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)
    assert sorted(ops) == sorted(expected_ops)


@pytest.mark.parametrize("bucket", ["none", "all"])
def test_inductor_code_gathers_and_waits_bucketed_or_not(bucket: str, device: torch.device) -> None:
    torch._dynamo.reset()
    with emulated_link(W, device="cuda", **TIMED_CUDA) as link:
        name = group_name()

        def product(x: Tensor, *shards: Tensor) -> Tensor:
            launched = [OPS.all_gather_into_tensor(shard, W, name) for shard in shards]
            for weight in launched:
                x = x @ OPS.wait_tensor(weight)
            return x

        shards, x = (
            [small_numbers(8 * W * 8, torch.float32, device).view(8, W * 8) for _ in range(3)],
            torch.ones(5, W * 8),
        )
        patches: Any = {"bucket_all_gathers_fx": bucket}
        compiled = torch.compile(product, fullgraph=True, options=patches)
        expected = x.to(device)
        for shard in shards:
            expected = expected @ shard.repeat(W, 1)
        torch.testing.assert_close(compiled(x.to(device), *shards), expected)
        assert len(link.transfers) == (3 if bucket == "none" else 1)
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [{}, TIMED_CUDA], ids=["instant", "timed"])
def test_functional_collectives_are_captured_in_a_cuda_graph_and_replayed(options: dict[str, Any]) -> None:
    with emulated_link(W, device="cuda", **options) as link:
        capture_and_replay(link)


def capture_and_replay(link: EmulatedLink) -> None:
    name, x = group_name(), torch.ones(1 << 16, device="cuda")

    def step() -> Tensor:
        whole = OPS.wait_tensor(OPS.all_gather_into_tensor(x * 2, W, name))
        return OPS.wait_tensor(OPS.reduce_scatter_tensor(whole + 1, "sum", W, name)).clone()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    link.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    assert link.transfers == []
    for value in (1.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert out.min().item() == out.max().item() == (2 * value + 1) * W
    assert math.prod(out.shape) == 1 << 16
    assert step().equal(out)  # the link works on
