"""Blocks whose code is traced once compute the bits that blocks written out compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fxshard.compile.backend import frames_of
from fxshard.hardware import BUILTIN
from fxshard.ir import regions
from tests.numerics.harness import FSDP2, Run, Scenario, System, compare, fxshard_system, train
from tests.numerics.microbatches import several
from tests.numerics.models import GPT, MLP, WIDTH, Block
from tests.numerics.scenarios import BF16, CHECKPOINTED, LANGUAGE, REGRESSION, RESHARD, SCENARIOS, Lane, names
from tests.ranks import two_ranks

THREE_BLOCKS: Final = replace(REGRESSION, model=partial(MLP, num_blocks=3))  # the first reads what needs no gradient


def with_regions(lower: str = "eager", **options: Any) -> System:
    """Return the system under test."""
    return fxshard_system(lower=lower, regions="auto", **options)


def num_calls(run: Run) -> int:
    """Return how often the first graphs of a run call regions, forward and backward."""
    module = cast(Any, run.model)
    found = 0
    for frame in frames_of(getattr(module, "_orig_mod", module)):
        for stage in ("forward", "backward"):
            graph = frame.history.last(stage).graph
            found += sum(regions.code_of(node) is not None for node in graph.nodes)
    return found


def check(scenario: Scenario, **options: Any) -> Run:
    """Hold the interpreted graphs to the bits of FSDP2, as those with every block written out are held elsewhere."""
    ours = train(scenario, with_regions(**options))
    compare(ours, train(scenario, FSDP2), rtol=0.0, atol=0.0)
    return ours


class Dropping(MLP):
    """Drops out after each block."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        for block in self.blocks:
            cast(Block, block).up.register_forward_hook(lambda module, args, result: nn.functional.dropout(result, 0.5))


def keep_products(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """A policy of selective activation checkpointing."""
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(MLP):
    """Computes its blocks again but for their products, each under a policy object of its own."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            contexts = partial(create_selective_checkpoint_contexts, keep_products)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return self.head(x)


class SeveralResults(nn.Module):
    """Blocks that give two tensors and one that needs no gradient; of the last one's, one leads to no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Pair() for _ in range(3))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, y, size = self.first(x), self.second(x), x.new_zeros(())
        for block in self.blocks:
            x, y, own = block(x, y)
            size = size + own
        return x * (1 + size + y.detach().mean())


class Transposing(nn.Module):
    """Blocks whose results are not contiguous; some of their gradients are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Turned() for _ in range(4))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unflatten(-1, (2, -1))
        for block in self.blocks:
            x = block(x).transpose(1, 2)
        return self.last(self.blocks[0](x).flatten(1))


class _Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH // 2, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.right(torch.tanh(self.left(x))).transpose(1, 2))


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y = torch.tanh(self.left(x) + y), torch.sin(self.right(y) * x)
        return x, y, x.detach().abs().mean()


COMPILED: Final = {
    "a language model": LANGUAGE,
    "accumulation": replace(THREE_BLOCKS, backward=several),
    "selective checkpointing": replace(REGRESSION, model=Selective, shard_kwargs=RESHARD),
    "activation checkpointing": replace(CHECKPOINTED, shard_kwargs=RESHARD),
    "several results": replace(REGRESSION, model=SeveralResults),
    "strides": replace(REGRESSION, model=Transposing),
}


class Scaled(MLP):
    """Reads a number in float64, of which Dynamo makes a symbol, outside of its blocks."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        self.register_buffer("scale", torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@two_ranks
@pytest.mark.parametrize("model", [THREE_BLOCKS.model, Scaled])
def test_accumulates_with_regions(model: Callable[[], nn.Module]) -> None:
    assert num_calls(check(replace(THREE_BLOCKS, model=model, backward=several)))


@two_ranks
@pytest.mark.parametrize("model", [Dropping, SeveralResults, Transposing])
def test_trains(model: type[nn.Module]) -> None:
    assert num_calls(check(replace(REGRESSION, model=model)))


@two_ranks
def test_computes_blocks_again_in_backward() -> None:
    assert num_calls(check(replace(CHECKPOINTED, shard_kwargs=RESHARD))) == 2 * 2


@two_ranks
def test_computes_blocks_again_as_a_policy_says() -> None:
    assert num_calls(check(replace(REGRESSION, model=Selective, shard_kwargs=RESHARD))) == 2 * 2


@two_ranks
def test_blocks_are_cut_where_their_gathers_are() -> None:
    assert num_calls(check(LANGUAGE, bucket=0.008)) == 2 * 2 * 2


@two_ranks
def test_trains_in_mixed_precision() -> None:
    calls = num_calls(check(replace(THREE_BLOCKS, shard_kwargs={"mp_policy": BF16, **RESHARD})))
    assert calls == 2 * 2  # two blocks that are alike, forward and backward


class Embedded(Dropping):
    """A layer of the root's before the blocks, whose gradient is the last one, and large."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


@two_ranks
@pytest.mark.parametrize("model", [Embedded, partial(GPT, checkpointing=True)])
def test_takes_apart_the_block_whose_gradients_hide_the_last_reduction(
    model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    slow_kernels = replace(BUILTIN["cpu"], link_latency=1e-6, kernel_overhead=1e-3, link_bandwidth=1e6)
    (hardware := tmp_path / "cpu.json").write_text(slow_kernels.to_json())
    scenario = replace(REGRESSION if model is Embedded else LANGUAGE, model=model, shard_kwargs=RESHARD)
    ours = check(scenario, prefetch="auto", hardware=str(hardware))
    module = cast(Any, ours.model)
    stages = frames_of(getattr(module, "_orig_mod", module))[0].history.stages
    assert stages["backward"]["defer_weight_gradients"].changed
    assert num_calls(ours) < 2 * len(module.blocks)


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("name", names(Lane.ONE_RANK))
def test_computes_the_same_bits_with(name: str) -> None:
    scenario = SCENARIOS[name]
    check(replace(scenario, model=partial(MLP, num_blocks=3)) if scenario.model is MLP else scenario)


@pytest.mark.slow
@two_ranks(timeout=240)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_computes_what_fsdp2_does(name: str) -> None:
    ours = train(COMPILED[name], with_regions("inductor"))
    assert num_calls(ours)
    # As `check_inductor`: losses and gradients. Keys' biases have gradients of rounding noise, which AdamW scales up.
    compare(ours, train(COMPILED[name], FSDP2), rtol=1e-5, atol=1e-6, params=False)


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_writes_over_no_gradient_that_a_part_of_a_block_hands_on() -> None:
    """A part that ends in a residual connection hands its gradient on as it is.

    Inductor takes each result of a part for new memory. Were this gradient one of them, others would be wrong.
    """
    scenario = replace(LANGUAGE, model=partial(GPT, num_blocks=3))
    ours = train(scenario, with_regions("inductor", bucket=0.004))
    assert num_calls(ours) > 2 * 3  # blocks are cut
    compare(ours, train(scenario, FSDP2), rtol=1e-5, atol=1e-6, params=False)
