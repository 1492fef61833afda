"""`reshard_after_forward=2` on four ranks trains as in FSDP2, and backward gathers over two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fxshard
from fxshard.sharding.sharded_module import plain_module, units_under
from fxshard.torch_private import process_group_of
from tests.numerics import mesh_bodies
from tests.numerics.harness import (
    EAGER,
    Run,
    Tools,
    adopted,
    check,
    check_against_unsharded,
    check_bitwise,
    check_inductor,
    compile_module,
    only_shard,
)
from tests.numerics.mesh_bodies import Body, checks_of
from tests.numerics.models import Scalars
from tests.numerics.scenarios import LANGUAGE, REGRESSION
from tests.state import processes

BY_TWO = {"reshard_after_forward": 2}
BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), **BY_TWO}
MLP_BY_TWO = replace(REGRESSION, shard_kwargs=BY_TWO)


def one_line(model: nn.Module, tools: Tools) -> nn.Module:
    """FSDP2 shards what stands in a ModuleList, and the rest, as the one-line form does."""
    if not tools.system.ours:
        return only_shard(model, tools)
    return compile_module(model, options={**EAGER, **BY_TWO})


def changed(run: Run, step: int) -> None:
    """From the third step on all ranks share the parameters again."""
    model: Any = run.model
    if step == 2 and run.system.fully_shard is not None:
        model.set_reshard_after_forward(True)


def backward_gathers_over_two_ranks() -> None:
    run = check(MLP_BY_TWO)
    (frame,) = fxshard.explanation_of(run.model).frames
    launches = {kind: frame.collectives(kind) for kind in ("forward", "backward")}
    units = {kind: {c.unit for c in found if "all_gather" in c.op} for kind, found in launches.items()}
    assert units == {"forward": {"blocks.0", "blocks.1", ""}, "backward": {"blocks.0/2", "blocks.1/2", "/2"}}
    first = dist.get_rank() // 2 * 2
    for unit in units_under(plain_module(run.model)):
        assert dist.get_process_group_ranks(process_group_of(unit.plan.subgroup)) == [first, first + 1]


BODIES: dict[str, Body] = {
    **checks_of(MLP_BY_TWO),
    "compiled": backward_gathers_over_two_ranks,
    "gpt": lambda: check(replace(LANGUAGE, shard_kwargs=BY_TWO)),
    "bfloat16": lambda: check_bitwise(replace(MLP_BY_TWO, shard_kwargs=BF16)),
    "scalars": lambda: check_against_unsharded(replace(MLP_BY_TWO, model=Scalars)),
    "adopted, bfloat16": lambda: check_bitwise(replace(MLP_BY_TWO, prepare=adopted, shard_kwargs=BF16)),
    "one line": lambda: check(replace(MLP_BY_TWO, prepare=one_line)),
    "offloaded": lambda: check(replace(MLP_BY_TWO, shard_kwargs={**BY_TWO, "offload_policy": CPUOffloadPolicy(False)})),
    "changed": lambda: check(replace(MLP_BY_TWO, before_step=changed)),
    "inductor": lambda: check_inductor(MLP_BY_TWO),
    # Inductor keeps fp32 between fused bf16 operations, where eager rounds: a bf16 ulp is 2**-8.
    "inductor, bfloat16": lambda: check_inductor(replace(MLP_BY_TWO, shard_kwargs=BF16), rtol=2**-6, atol=2**-6),
}


def run(*names: str) -> None:
    """Run some of them, one after the other."""
    mesh_bodies.run(BODIES, names)


DEFAULT = ("compiled", "called twice", "adopted, bfloat16")


@pytest.mark.multi_rank
def test_two_ranks_share_the_parameters_between_forward_and_backward() -> None:
    processes.run(4, run, *DEFAULT)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BODIES if name not in DEFAULT])
def test_two_ranks_share_the_parameters_also(name: str) -> None:
    processes.run(4, run, name)
