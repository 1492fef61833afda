"""Blocks that are alike become code once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fxshard.api import fully_shard
from tests.fake_ranks import fake_ranks
from tests.graphs import ResidualLayers, layers_of


def kernels(count: int, regions: str) -> int:
    """How many kernels Inductor generates for a step of a model with `count` layers, each gathered by itself."""
    torch._dynamo.reset()
    metrics.reset()
    model = ResidualLayers(count)
    with fake_ranks(2) as mesh, inductor_config.patch(force_disable_caches=True):
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        compiled = torch.compile(model, backend="fxshard", options={"regions": regions, "schedule": "fsdp2"})
        compiled(torch.ones(2, 4)).sum().backward()
    return metrics.generated_kernel_count


@pytest.mark.slow
def test_the_kernels_of_a_block_are_generated_once() -> None:
    outside = kernels(4, "auto")
    assert kernels(6, "auto") == outside < kernels(4, "off")


class Products(TorchDispatchMode):
    """Counts matrix products of compiled code; like most modes it knows no op of torch that calls a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo's code run under it; under any other mode the model runs as if it were not compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten.mm
        return func(*args, **kwargs or {})


def products(regions: str) -> int:
    """How many matrix products a mode sees of a step that the interpreter runs."""
    torch._dynamo.reset()
    model = ResidualLayers(3)
    with fake_ranks(2) as mesh:
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        compiled = torch.compile(model, backend="fxshard", options={"regions": regions, "lower": "eager"})
        compiled(torch.ones(2, 4)).sum().backward()
        mode = Products()
        with mode:
            compiled(torch.ones(2, 4)).sum().backward()
    return mode.count


def test_dispatch_modes_see_what_regions_compute() -> None:
    assert products("auto") == products("off") > 0


def keep_products(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """A policy of selective activation checkpointing."""
    is_product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(ResidualLayers):
    """Computes its layers again but for their products."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.contexts = partial(create_selective_checkpoint_contexts, keep_products)
        if name:
            self.contexts.cache_hash = name  # type: ignore[attr-defined]  # torch's way to name a policy for its caches

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=self.contexts)
        return x


def found_again(name: str) -> int:
    """How often the second of two compilations finds code in AOTAutograd's cache."""
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        model = Selective(name)
        with fake_ranks(2) as mesh:
            for layer in layers_of(model):
                fully_shard(layer, mesh=mesh)
            torch.compile(model, backend="fxshard")(torch.ones(2, 4)).sum().backward()
    return int(counters["aot_autograd"]["autograd_cache_hit"])


@pytest.mark.slow
def test_code_under_a_policy_is_cached_if_the_policy_has_a_name() -> None:
    with fresh_cache():
        assert found_again("") == 0
        assert found_again("keep products") == 1
