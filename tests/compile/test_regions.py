"""Blocks that are alike become code once."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch.utils.flop_counter import FlopCounterMode

from fxshard.api import fully_shard
from tests.graphs import ResidualLayers, fake_ranks, layers_of


def kernels(count: int, regions: str) -> int:
    """How many kernels Inductor generates for a step of a model with `count` layers."""
    torch._dynamo.reset()
    metrics.reset()
    model = ResidualLayers(count)
    with fake_ranks(2) as mesh, inductor_config.patch(force_disable_caches=True):
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        compiled = torch.compile(model, backend="fxshard", options={"regions": regions})
        compiled(torch.ones(2, 4)).sum().backward()
    return metrics.generated_kernel_count


@pytest.mark.slow
def test_the_kernels_of_a_block_are_generated_once() -> None:
    outside = kernels(4, "auto")
    assert kernels(6, "auto") == outside < kernels(4, "off")


def flops(regions: str) -> int:
    """What torch's counter sees of a step that the interpreter runs."""
    torch._dynamo.reset()
    model = ResidualLayers(3)
    with fake_ranks(2) as mesh:
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        compiled = torch.compile(model, backend="fxshard", options={"regions": regions, "lower": "eager"})
        compiled(torch.ones(2, 4)).sum().backward()
        with FlopCounterMode(display=False) as counter:
            compiled(torch.ones(2, 4)).sum().backward()
    return counter.get_total_flops()


def test_dispatch_modes_see_what_regions_compute() -> None:
    assert flops("auto") == flops("off") > 0
