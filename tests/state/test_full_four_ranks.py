"""Four ranks: some have no rows, and expert parameters live on groups of two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxshard
from tests.state.states import adamw, assert_same, net, sharded, take_steps, trained

RANKS = 4


def on_four_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("fxshard_gloo", store=store, rank=rank, world_size=RANKS)
    a_state_of_one_rank_comes_back_from_four()
    rows_of_ranks_that_have_none()
    experts_on_groups_of_two()
    models_on_two_ranks_each()
    checkpoints_of_models_on_two_ranks_each(folder)
    whole_weights_on_some_ranks()
    dist.destroy_process_group()


def a_state_of_one_rank_comes_back_from_four() -> None:
    plain, reference = trained()
    model = sharded(net(seed=1))
    optim = adamw(model)
    mine = dist.get_rank() == 2
    fxshard.load_full_state_dict(model, plain.state_dict() if mine else {})
    fxshard.load_full_optim_state_dict(model, optim, reference.state_dict() if mine else {})
    for recipient in (0, 3, None):
        weights = fxshard.full_state_dict(model, recipient_rank=recipient)
        state = fxshard.full_optim_state_dict(model, optim, recipient_rank=recipient)
        wanted = recipient in (None, dist.get_rank())
        assert_same(weights, plain.state_dict() if wanted else {})
        assert_same(state, reference.state_dict() if wanted else {})


def rows_of_ranks_that_have_none() -> None:
    model: Any = sharded(net())
    optim = adamw(model)
    take_steps(model, optim)
    assert model.one_row.to_local().numel() == (8 if dist.get_rank() == 0 else 0)
    expected = fxshard.full_optim_state_dict(model, optim, recipient_rank=None, keys="fqn")
    if dist.get_rank():
        del optim.state[model.one_row]
    for recipient in (0, 1, 2, None):
        found = fxshard.full_optim_state_dict(model, optim, recipient_rank=recipient, keys="fqn")
        if recipient in (None, dist.get_rank()):
            assert_same(found, expected)


def experts_on_groups_of_two() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "experts"))["experts"]
    model = net()
    torch.nn.init.constant_(model.blocks[0][0].weight, float(dist.get_rank() // 2))
    expert = model.blocks[0][0].weight.detach().clone()
    fxshard.fully_shard(model.blocks[0], mesh=mesh)
    fxshard.fully_shard(model)
    optim = adamw(model)
    take_steps(model, optim)
    if dist.get_rank() > 1:
        for parameter in model.blocks[0].parameters():
            del optim.state[parameter]  # these experts saw no token yet
    own = model.blocks[0][0].weight.full_tensor()
    for recipient in (1, 2, None):
        state = fxshard.full_optim_state_dict(model, optim, recipient_rank=recipient, keys="fqn")
        weights = fxshard.full_state_dict(model, recipient_rank=recipient)
        if recipient in (None, dist.get_rank()):
            assert ("blocks.0.0.weight" in state["state"]) == (dist.get_rank() < 2)
            assert weights["blocks.0.0.weight"].shape == expert.shape
            assert torch.equal(weights["blocks.0.0.weight"], own)  # not those of the other group
    weights = fxshard.full_state_dict(model, recipient_rank=None)
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=None)
    take_steps(model, optim, first=2)
    fxshard.load_full_state_dict(model, weights)
    fxshard.load_full_optim_state_dict(model, optim, state)
    assert_same(fxshard.full_state_dict(model, recipient_rank=None), weights)
    assert_same(fxshard.full_optim_state_dict(model, optim, recipient_rank=None), state)
    with pytest.raises(fxshard.ConfigError, match=r"rank 0 has no part in blocks\.0\.0\.weight") as caught:
        fxshard.load_full_state_dict(model, weights if dist.get_rank() == 0 else {})
    texts: list[Any] = [None] * RANKS
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1


def models_on_two_ranks_each() -> None:
    """As the stages of a pipeline: another model on each half of the ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))["shards"]
    stage = dist.get_rank() // 2
    model = fxshard.fully_shard(net(seed=stage), mesh=mesh)
    optim = adamw(model)
    take_steps(model, optim, steps=1 + stage)
    for recipient in (0, 1):
        weights = fxshard.full_state_dict(model, recipient_rank=recipient)
        state = fxshard.full_optim_state_dict(model, optim, recipient_rank=recipient)
        assert (len(weights) > 0) == (dist.get_rank() % 2 == recipient)
        assert not state or state["state"][0]["step"] == 1 + stage
        fxshard.load_full_state_dict(model, weights)
        fxshard.load_full_optim_state_dict(model, optim, state)


def checkpoints_of_models_on_two_ranks_each(folder: str) -> None:
    """The second half saves first: neither waits for the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))["shards"]
    shards: list[Any] = [fxshard.fully_shard, torch_fully_shard]
    for shard in shards:
        stage = dist.get_rank() // 2
        path = f"{folder}/{shard.__module__}-{stage}"
        torch.manual_seed(stage)
        model, other = (shard(nn.Linear(5, 5), mesh=mesh) for _ in range(2))
        optim, other_optim = adamw(model), adamw(other)
        if stage == 0:
            dist.barrier()
        fxshard.save_checkpoint(path, model, optim, extra=stage)
        assert fxshard.load_checkpoint(path, other, other_optim) == stage
        assert torch.equal(other.weight.full_tensor(), model.weight.full_tensor())
        if stage == 1:
            dist.barrier()


def whole_weights_on_some_ranks() -> None:
    """From four ranks, replicas, tensor parallelism, and groups of two with values of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    replicas = fxshard.fully_shard(net(), mesh=mesh)
    parallel = net()
    plan = {"blocks.0.0": ColwiseParallel(), "blocks.0.2": RowwiseParallel(), "blocks.1.0": RowwiseParallel()}
    parallelize_module(parallel, mesh["inner"], plan)
    fxshard.fully_shard(parallel, mesh=mesh["outer"])
    apart = net()
    nn.init.constant_(apart.blocks[0][0].weight, float(dist.get_rank() // 2))
    own = apart.blocks[0][0].weight.detach().clone()
    fxshard.fully_shard(apart.blocks[0], mesh=mesh["inner"])
    fxshard.fully_shard(apart)
    expected = net().state_dict()
    del expected["head.weight"]
    for model in (sharded(net()), replicas, parallel, apart):
        wanted = {**expected, "blocks.0.0.weight": own if model is apart else expected["blocks.0.0.weight"]}
        for ranks in (None, 2, [1, 3], [0, 1]):
            found = {
                name: weight.clone() for name, weight in fxshard.full_weights(model, bucket_mib=0.002, ranks=ranks)
            }
            chosen = range(RANKS) if ranks is None else [ranks] if isinstance(ranks, int) else ranks
            assert_same(found, wanted if dist.get_rank() in chosen else {})


@pytest.mark.multi_rank
@pytest.mark.commands
def test_four_ranks(tmp_path: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.start_processes(on_four_ranks, (str(tmp_path),), nprocs=RANKS, start_method="spawn")
