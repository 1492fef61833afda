"""Two pipeline stages of two data-parallel ranks each, against one process that trains the whole model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import ConfigError
from fxshard.pipelining import ShardedStage
from tests.numerics.harness import compile_module
from tests.numerics.models import Block

WIDTH, ROWS, NUM_MICROBATCHES, NUM_STEPS = 6, 8, 4, 3
STAGES, REPLICAS = 2, 2


def stage_module(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(Block(WIDTH), Block(WIDTH))


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    return x, y


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train_stage(rank: int, folder: str, lower: str, schedule: Any) -> None:
    """Train one stage; keep its gradients of the first step and its final parameters."""
    store = dist.FileStore(f"{folder}/store", STAGES * REPLICAS)
    dist.init_process_group("fxshard_gloo", store=store, rank=rank, world_size=STAGES * REPLICAS)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (STAGES, REPLICAS), mesh_dim_names=("pp", "dp"))
    index, replica = mesh.get_coordinate() or (0, 0)
    module = stage_module(index)
    for block in cast(nn.Sequential, module):
        fxshard.fully_shard(block, mesh=mesh["dp"])
    fxshard.fully_shard(module, mesh=mesh["dp"])
    compiled = compile_module(module, options={"lower": lower})
    given, made = (torch.randn(ROWS // NUM_MICROBATCHES, WIDTH, requires_grad=grad) for grad in (index > 0, True))
    group = mesh.get_group("pp")
    stage = ShardedStage(compiled, index, STAGES, torch.device("cpu"), input_args=given, output_args=made, group=group)
    runner = schedule(stage, NUM_MICROBATCHES, loss_fn=squared_error)
    optim = torch.optim.SGD(module.parameters(), lr=0.1)
    grads = {}
    for step in range(NUM_STEPS):
        x, y = batch(step, replica)
        if index == 0:
            runner.step(x)
        else:
            runner.step(target=y)
        if step == 0:
            grads = {name: whole(cast(Tensor, p.grad)) for name, p in module.named_parameters()}
        optim.step()
        optim.zero_grad()
    kinds = {graph.kind: graph.collectives for graph in fxshard.compiled_graphs(module)}
    params = {name: whole(p) for name, p in module.named_parameters()}
    torch.save((grads, params, kinds), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def whole(x: Tensor) -> Tensor:
    return cast(DTensor, x.detach()).full_tensor()


def reference() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of the first step and the final parameters of training on everything at once."""
    model = nn.Sequential(*(stage_module(i) for i in range(STAGES)))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = {}
    for step in range(NUM_STEPS):
        for replica in range(REPLICAS):
            x, y = batch(step, replica)
            (squared_error(model(x), y) / REPLICAS).backward()
        if step == 0:
            grads = {name: cast(Tensor, p.grad).clone() for name, p in model.named_parameters()}
        optim.step()
        optim.zero_grad()
    return grads, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.multi_rank
@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleGPipe])
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_pipeline_reduces_once_per_step_and_trains_like_one_process(schedule: Any, lower: str) -> None:
    expected_grads, expected_params = reference()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_stage, (folder, lower, schedule), nprocs=STAGES * REPLICAS)
        saved = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(STAGES * REPLICAS)]
    for rank, (grads, params, kinds) in enumerate(saved):
        for found, expected in ((grads, expected_grads), (params, expected_params)):
            for (
                name,
                value,
            ) in found.items():  # float32 sums, in another order
                torch.testing.assert_close(value, expected[f"{rank // REPLICAS}.{name}"], rtol=1e-5, atol=1e-6)
        assert "reduce_scatter" not in kinds["backward_accumulate"]
        assert "reduce_scatter" in kinds["backward_final"]


def test_refuses_a_module_that_is_not_sharded() -> None:
    with pytest.raises(ConfigError, match="ShardedStage expects a module that fully_shard has sharded, got Linear"):
        ShardedStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
