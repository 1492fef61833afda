"""Under a policy of selective activation checkpointing a model trains as without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.numerics.harness import (
    Prepare,
    Run,
    Scenario,
    Tools,
    blocks_of,
    check,
    check_against_unsharded,
    compile_each_block,
    fxshard_system,
    only_shard,
    shard_and_compile,
    shard_blocks,
    start,
    train_step,
)
from tests.numerics.microbatches import forwards_ahead, kept
from tests.numerics.models import MLP
from tests.numerics.scenarios import REGRESSION
from tests.pairwise import slow
from tests.ranks import two_ranks

_c10d = torch.ops._c10d_functional

SAVED: Mapping[str, Callable[[Any], bool]] = {
    "products": lambda op: op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default),
    "everything": lambda op: True,
    "nothing": lambda op: False,
    "waits": lambda op: op is _c10d.wait_tensor.default,
    "collectives": lambda op: op in (_c10d.all_gather_into_tensor.default, _c10d.wait_tensor.default),
}
"""Name of a policy -> which ops it saves."""


class Selective(MLP):
    """Blocks that are recomputed under a policy, each after a norm that belongs to the root's unit."""

    def __init__(self, saved: str, times: int = 1, num_blocks: int = 2) -> None:
        super().__init__(num_blocks)
        self.norm = nn.LayerNorm(self.head.in_features)
        self.saved, self.times = saved, times

    def policy(self, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if SAVED[self.saved](op) else CheckpointPolicy.PREFER_RECOMPUTE

    def normed(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(self.norm(x))

    def recomputed(self, block: nn.Module, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        region = partial(self.normed, block)
        return checkpoint(region, x, use_reentrant=False, context_fn=contexts)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = self.recomputed(block, x)
        return self.head(self.norm(x))


class SelectiveInTwoGraphs(Selective):
    """The same with a graph break between two blocks."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        x = self.recomputed(first, x)
        torch._dynamo.graph_break()
        return self.head(self.norm(self.recomputed(second, x)))


def listed(model: nn.Module, tools: Tools) -> nn.Module:
    """Blocks that are compiled one by one, with prefetch lists."""
    shard_blocks(model, tools)
    first, second = (cast(Any, block) for block in blocks_of(model))
    if tools.system.fully_shard is not None:
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    for block in (first, second):
        tools.compile_in_place(block)
    return model


def scenario(saved: str, **kwargs: Any) -> Scenario:
    given: dict[str, Any] = {"model": partial(Selective, saved), "prepare": compile_each_block, **kwargs}
    return replace(REGRESSION, **given)


@two_ranks
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("prepare", [compile_each_block, slow(only_shard)])
def test_trains_the_same(prepare: Prepare, saved: str) -> None:
    check(scenario(saved, prepare=prepare))


@pytest.mark.slow
@two_ranks
def test_trains_the_same_with_prefetch_lists() -> None:
    check(scenario("nothing", prepare=listed))


@two_ranks
def test_trains_the_same_where_a_model_breaks_into_graphs() -> None:
    model = partial(SelectiveInTwoGraphs, "products")
    check_against_unsharded(scenario("products", model=model, prepare=shard_and_compile))


@two_ranks(timeout=240)
@pytest.mark.parametrize("saved", [slow("products"), "collectives"])
def test_compiled_code_trains_the_same(saved: str) -> None:
    num_blocks = 1 if saved == "collectives" else 2
    check_against_unsharded(scenario(saved, model=partial(Selective, saved, num_blocks=num_blocks)), lower="inductor")


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("saved", ["nothing", "everything"])
def test_a_block_that_is_called_twice_trains_the_same_with_parameters_that_stay(saved: str) -> None:
    check_against_unsharded(scenario(saved, model=partial(Selective, saved, times=2), backward=kept))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("saved", ["nothing", "everything"])
def test_recomputation_gathers_as_its_forward_did(saved: str) -> None:
    system = fxshard_system(dtype=torch.float64, resident_gib=1)
    check_against_unsharded(scenario(saved, backward=forwards_ahead), system=system)


@two_ranks
@pytest.mark.parametrize("streams", ["nccl", "side"])
def test_a_policy_that_saves_waits_leaves_no_gather_unwaited(streams: str) -> None:
    run: Run = start(scenario("waits"), fxshard_system(streams=streams))
    unwaited = _get_work_registry_size()
    for step in range(2):
        train_step(run, step)
    assert _get_work_registry_size() == unwaited
