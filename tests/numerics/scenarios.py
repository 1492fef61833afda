"""What is trained: one list, of which each lane takes its part.

Two gloo ranks train them in `tests/numerics` and `tests/state`, one rank and the emulated ranks of a link on a GPU in
`tests/gpu`, and both of these on the CPU in `tests/gpu_dry`. A new feature gets a line here, with `Lane.ONE_RANK`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Flag, auto
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from tests.numerics.harness import (
    Scenario,
    Tools,
    blocks_of,
    compile_each_block,
    only_compile,
    only_shard,
    shard_blocks,
    shard_blocks_as_one_unit,
    shard_nested,
)
from tests.numerics.loops import (
    clip_and_update,
    evaluate,
    foreach_adamw,
    freeze_then_thaw,
    fused_adamw,
    halve_gradients,
    one_backward_through_two_forwards,
    scaled,
    sgd,
    squared_error_under_autocast,
    two_forwards_before_two_backwards,
    update_and_zero,
)
from tests.numerics.microbatches import forwards_ahead, several, with_no_sync
from tests.numerics.models import (
    GPT,
    MLP,
    BatchNorm,
    Broken,
    CalledTwice,
    LoRA,
    ReadOnBothSides,
    ReadTwice,
    SelfAttention,
    Tables,
    TinyUnits,
    Uneven,
    Unused,
    cross_entropy,
    mlp_with_a_frozen_block,
    rows,
    tokens,
    tokens_of_many_shapes,
)


class Lane(Flag):
    """Where a scenario is trained, and lowered to what: the interpreter, or Inductor where it says COMPILED."""

    RANKS = auto()  # two gloo ranks
    RANKS_COMPILED = auto()
    RESUMED = auto()  # the same ranks, from a checkpoint
    ONE_RANK = auto()  # of NCCL, or of gloo on the CPU
    ONE_RANK_COMPILED = auto()
    ONE_RANK_COMPILED_BF16 = auto()
    LINK = auto()  # emulated ranks: units are gathered and reduced
    LINK_COMPILED = auto()
    LINK_COMPILED_BF16 = auto()


RANKS_BOTH = Lane.RANKS | Lane.RANKS_COMPILED
ONE_RANK_BOTH = Lane.ONE_RANK | Lane.ONE_RANK_COMPILED
LINK_BOTH = Lane.LINK | Lane.LINK_COMPILED
COMPILED_BF16 = Lane.ONE_RANK_COMPILED_BF16 | Lane.LINK_COMPILED_BF16

WIDE: Final = 32  # heads of 16, as kernels for attention want them
REGRESSION: Final = Scenario(model=MLP, batch=rows())
ONE_BLOCK: Final = replace(REGRESSION, model=partial(MLP, num_blocks=1))  # a unit beside the root's, to compile little
LANGUAGE: Final = Scenario(model=partial(GPT, width=WIDE), batch=tokens(), loss=cross_entropy)
TIED: Final = replace(LANGUAGE, model=partial(GPT, width=WIDE, tied=True))
CHECKPOINTED: Final = replace(LANGUAGE, model=partial(GPT, width=WIDE, checkpointing=True))
SHAPES: Final = replace(LANGUAGE, batch=tokens_of_many_shapes)
RESHARD: Final = {"reshard_after_forward": True}
KEEP: Final = {"reshard_after_forward": False}
BF16: Final = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ON_HOST: Final = {"offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())}
DYNAMIC: Final = {"dynamic": True, "fullgraph": True}


def reduce_in_a_group_of_its_own(model: nn.Module, tools: Tools) -> nn.Module:
    """Shard block by block; ours reduces in a process group beside the one that gathers."""
    shard_blocks(model, tools)
    if tools.system.ours:
        cast(Any, model).set_separate_reduce_scatter_group(True)
    return tools.compile(model)


def shard_over_replicas(model: nn.Module, tools: Tools) -> nn.Module:
    """Shard block by block over half of the ranks; the other half holds the same."""
    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if ranks > 1 else (1, 1)
    mesh = init_device_mesh(tools.system.device, shape, mesh_dim_names=("replicate", "shard"))
    for block in blocks_of(model):
        tools.shard(block, mesh=mesh)
    tools.shard(model, mesh=mesh)
    return tools.compile(model)


_LIST: Final[Mapping[str, tuple[Scenario, Lane]]] = {
    "plain training": (REGRESSION, ONE_RANK_BOTH | LINK_BOTH | Lane.RESUMED),
    "a language model": (LANGUAGE, ONE_RANK_BOTH | Lane.ONE_RANK_COMPILED_BF16),
    "resharded after forward": (replace(LANGUAGE, shard_kwargs=RESHARD), RANKS_BOTH | Lane.ONE_RANK | Lane.LINK),
    "kept after forward": (replace(LANGUAGE, shard_kwargs=KEEP), Lane.ONE_RANK | Lane.LINK),
    "activation checkpointing": (
        replace(CHECKPOINTED, shard_kwargs=RESHARD),
        RANKS_BOTH | ONE_RANK_BOTH | LINK_BOTH | Lane.LINK_COMPILED_BF16,
    ),
    "accumulation": (replace(REGRESSION, backward=several), ONE_RANK_BOTH | LINK_BOTH | COMPILED_BF16),
    "accumulation of a tied weight": (replace(TIED, backward=several), Lane.ONE_RANK),
    "no_sync": (replace(REGRESSION, backward=with_no_sync), Lane.ONE_RANK),
    "forwards ahead of backwards": (replace(REGRESSION, backward=forwards_ahead), Lane.ONE_RANK),
    "frozen parameters": (replace(REGRESSION, model=mlp_with_a_frozen_block), Lane.ONE_RANK | Lane.LINK),
    "requires_grad changed": (replace(REGRESSION, before_step=freeze_then_thaw), RANKS_BOTH | Lane.ONE_RANK),
    "tied weights": (TIED, Lane.ONE_RANK | LINK_BOTH | Lane.RESUMED),
    "clipped gradients": (
        replace(REGRESSION, update=partial(clip_and_update, foreach=None)),
        Lane.ONE_RANK | Lane.LINK,
    ),
    "gradients zeroed in place": (replace(REGRESSION, update=update_and_zero), Lane.ONE_RANK),
    "hooks on gradients": (replace(REGRESSION, before_step=halve_gradients), Lane.ONE_RANK),
    "evaluation between": (replace(REGRESSION, before_step=evaluate), Lane.ONE_RANK),
    "GradScaler": (scaled(REGRESSION), Lane.ONE_RANK),
    "autocast": (replace(REGRESSION, loss=squared_error_under_autocast), Lane.ONE_RANK),
    "fused AdamW": (replace(REGRESSION, optimizer=fused_adamw), Lane.ONE_RANK),
    "foreach AdamW": (replace(REGRESSION, optimizer=foreach_adamw), Lane.ONE_RANK),
    "SGD with momentum": (replace(REGRESSION, optimizer=sgd), Lane.RESUMED),
    "a graph break": (replace(REGRESSION, model=Broken), RANKS_BOTH | Lane.ONE_RANK | Lane.LINK),
    "a unit of two graphs": (replace(REGRESSION, model=ReadOnBothSides), Lane.ONE_RANK),
    "each block compiled alone": (
        replace(LANGUAGE, prepare=compile_each_block),
        RANKS_BOTH | ONE_RANK_BOTH | LINK_BOTH | Lane.LINK_COMPILED_BF16,
    ),
    "nothing compiled": (replace(LANGUAGE, prepare=only_shard), Lane.ONE_RANK),
    "units inside units": (replace(LANGUAGE, prepare=shard_nested), RANKS_BOTH | Lane.ONE_RANK),
    "a list as one unit": (replace(REGRESSION, prepare=shard_blocks_as_one_unit), RANKS_BOTH),
    "one line": (replace(REGRESSION, prepare=only_compile), ONE_RANK_BOTH | Lane.RESUMED),
    "shapes that change": (SHAPES, RANKS_BOTH | ONE_RANK_BOTH),
    "dynamic": (replace(SHAPES, compile_kwargs=DYNAMIC), RANKS_BOTH),
    "not dynamic": (replace(SHAPES, compile_kwargs={"dynamic": False}), RANKS_BOTH),
    "a group for reductions": (
        replace(REGRESSION, prepare=reduce_in_a_group_of_its_own),
        Lane.ONE_RANK | Lane.LINK,
    ),
    "offloaded": (replace(REGRESSION, shard_kwargs=ON_HOST), ONE_RANK_BOTH | LINK_BOTH | Lane.LINK_COMPILED_BF16),
    "offloaded accumulation": (
        replace(REGRESSION, shard_kwargs=ON_HOST, backward=several),
        Lane.ONE_RANK | Lane.LINK | Lane.LINK_COMPILED_BF16,
    ),
    "offloaded with a graph break": (
        replace(REGRESSION, shard_kwargs=ON_HOST, model=Broken),
        Lane.ONE_RANK | LINK_BOTH,
    ),
    "replicas": (replace(REGRESSION, prepare=shard_over_replicas), LINK_BOTH | Lane.LINK_COMPILED_BF16),
    "two forwards, two backwards": (
        replace(REGRESSION, backward=two_forwards_before_two_backwards),
        RANKS_BOTH | Lane.ONE_RANK,
    ),
    # FSDP2 adds up in another order, so not to its bits.
    "two forwards, one backward": (
        replace(REGRESSION, backward=one_backward_through_two_forwards),
        Lane.RANKS_COMPILED,
    ),
    "LoRA": (replace(REGRESSION, model=LoRA), RANKS_BOTH | Lane.ONE_RANK),
    "uneven parameters": (Scenario(model=Uneven, batch=rows(15, 15)), RANKS_BOTH | Lane.ONE_RANK),
    "fewer rows than ranks": (replace(REGRESSION, model=TinyUnits), RANKS_BOTH),
    "tables": (replace(REGRESSION, model=Tables), RANKS_BOTH),
    "unused parameters": (replace(REGRESSION, model=Unused), RANKS_BOTH),
    "BatchNorm": (replace(REGRESSION, model=BatchNorm), RANKS_BOTH),
    "a parameter read twice": (replace(REGRESSION, model=ReadTwice), RANKS_BOTH | Lane.ONE_RANK),
    "a module called twice": (replace(REGRESSION, model=CalledTwice), RANKS_BOTH | Lane.ONE_RANK),
    "MultiheadAttention": (replace(LANGUAGE, model=SelfAttention), RANKS_BOTH | Lane.ONE_RANK),
}

SCENARIOS: Final[Mapping[str, Scenario]] = {name: scenario for name, (scenario, _) in _LIST.items()}

OWN_PRECISION: Final = ("autocast",)
"""Scenarios that compute in bf16 by themselves."""

NOT_IN_FSDP2: Final = ("hooks on gradients",)
"""What torch's fully_shard does otherwise: it runs no such hooks."""


def names(lane: Lane, *, but: tuple[str, ...] = ()) -> list[str]:
    """The scenarios of a lane, but some."""
    return [name for name, (_, lanes) in _LIST.items() if lane in lanes and name not in but]
