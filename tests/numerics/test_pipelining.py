"""torch's pipeline schedules over sharded stages: four ranks, against one process and against FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import ConfigError
from fxshard.pipelining import ShardedStage
from tests.numerics import pipelines
from tests.ranks import two_ranks
from tests.state import processes

# With torch 2.11 a rank of a V-shaped schedule greets itself, which gloo cannot.
V_SHAPED = () if torch.__version__.startswith("2.11.") else pipelines.V_SHAPED
SCHEDULES = (*pipelines.SINGLE, *pipelines.LOOPED, *V_SHAPED)

# What does more than train as FSDP2 does, under a schedule of each kind.
FEW = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", *V_SHAPED[:1])
MORE = [name for name in pipelines.BODIES if name not in ("as FSDP2", "resident", "counts")]


@pytest.mark.multi_rank
def test_two_stages_of_two_ranks_train_as_fsdp2() -> None:
    processes.run(4, pipelines.run, "ScheduleInterleavedZeroBubble", "not compiled", "resident")


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_as_fsdp2(schedule: str) -> None:
    processes.run(4, pipelines.run, schedule, "as FSDP2")


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gathers_and_reduces_once_per_step(schedule: str) -> None:
    processes.run(4, pipelines.run, schedule, "counts")


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("schedule", FEW)
@pytest.mark.parametrize("name", MORE)
def test_two_stages_of_two_ranks_also(schedule: str, name: str) -> None:
    processes.run(4, pipelines.run, schedule, name)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("schedule", V_SHAPED)
def test_a_layer_of_two_stages_has_the_gradients_of_both(schedule: str) -> None:
    processes.run(4, pipelines.run, schedule, *pipelines.ON_ONE_RANK)


@two_ranks
def test_refuses_a_weight_step_of_the_users() -> None:
    module = fxshard.fully_shard(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="ShardedStage takes no dw_builder: the backward of a sharded module"):
        ShardedStage(module, 0, 2, torch.device("cpu"), dw_builder=lambda: lambda: None)
