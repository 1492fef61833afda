"""Which modules make a unit, how they are compiled, what a rank stores, and over which group they are sharded."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import FxshardError
from tests.numerics.harness import (
    EAGER,
    Prepare,
    Run,
    Scenario,
    Tools,
    adamw,
    blocks_of,
    check,
    check_bitwise,
    compile_each_block,
    compile_module,
    fxshard_system,
    only_shard,
    shard_and_compile,
    shard_blocks,
    shard_root,
    squared_error,
    train,
    world_mesh,
)
from tests.numerics.models import MLP, Block, rows
from tests.numerics.scenarios import LANGUAGE, ONE_BLOCK, REGRESSION, SCENARIOS
from tests.pairwise import slow
from tests.ranks import fresh_ranks, join_group, two_ranks
from tests.watching import bytes_of_rows, storage_bytes


def compile_and_replace_each_block(model: nn.Module, tools: Tools) -> nn.Module:
    shard_blocks(model, tools)
    assert isinstance(model.blocks, nn.ModuleList)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = tools.compile(block)
    return model


@two_ranks
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_trains_in_eager_mode_without_any_compile(reshard_after_forward: bool | None) -> None:
    kwargs = {"reshard_after_forward": reshard_after_forward}
    check(replace(LANGUAGE, prepare=only_shard, shard_kwargs=kwargs))


@two_ranks
@pytest.mark.parametrize("reshard_after_forward", [True, slow(False), slow(None)])
def test_trains_compiled_as_a_whole(reshard_after_forward: bool | None) -> None:
    """In one graph, which is compiled once."""
    counters.clear()
    kwargs = {"reshard_after_forward": reshard_after_forward}
    check(replace(LANGUAGE, shard_kwargs=kwargs, compile_kwargs={"fullgraph": True}))
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("prepare", [compile_each_block, compile_and_replace_each_block])
@pytest.mark.parametrize("reshard_after_forward", [True, slow(None)])
def test_trains_with_each_block_compiled_alone(prepare: Prepare, reshard_after_forward: bool | None) -> None:
    kwargs = {"reshard_after_forward": reshard_after_forward}
    check(replace(LANGUAGE, prepare=prepare, shard_kwargs=kwargs))


@two_ranks
def test_trains_with_the_root_as_the_only_unit() -> None:
    check(replace(ONE_BLOCK, prepare=shard_root))


@two_ranks
def test_trains_with_a_list_of_modules_as_one_unit() -> None:
    check(SCENARIOS["a list as one unit"])


@pytest.mark.slow
@two_ranks
def test_trains_with_units_inside_units() -> None:
    check(SCENARIOS["units inside units"])


class SkipsABlock(MLP):
    """Calls its last block on every other step only."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks if self.calls % 2 else self.blocks[:-1]:
            x = block(x)
        return self.head(x)


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, only_shard])
def test_trains_a_model_that_skips_a_unit_in_some_steps(prepare: Prepare) -> None:
    check(replace(ONE_BLOCK, model=partial(SkipsABlock, 1), prepare=prepare))


# ---- what a rank stores


class Storage:
    """Looks at what a rank stores just before the optimizer drops the gradients."""

    def __init__(self) -> None:
        self.params = self.grads = self.states = 0
        self.full_shapes: list[torch.Size] = []

    def __call__(self, run: Run) -> None:
        parameters = list(run.model.parameters())
        run.optim.step()
        states = [x for state in run.optim.state.values() for x in state.values() if x.dim() > 0]
        self.params = storage_bytes(parameters)
        self.grads = storage_bytes(p.grad for p in parameters if p.grad is not None)
        self.states = storage_bytes(states)
        run.grads.clear()  # the harness's own copies are whole
        gc.collect()
        rows = {p.to_local().shape for p in parameters if isinstance(p, DTensor)}
        wide = {p.shape for p in parameters if p.dim() == 2} - rows
        live = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and x.untyped_storage().nbytes()]
        self.full_shapes = [x.shape for x in live if x.shape in wide]
        run.optim.zero_grad()


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, only_shard])
def test_keeps_no_full_parameter_or_gradient_after_a_step(prepare: Prepare) -> None:
    """It stores one share of parameters, gradients and optimizer state."""
    storage = Storage()
    scenario = Scenario(model=partial(MLP, width=17), batch=rows(17, 17), prepare=prepare, update=storage)
    run = train(scenario, fxshard_system())
    assert storage.full_shapes == [], storage.full_shapes
    share = bytes_of_rows(run.model)
    assert storage.params <= share
    assert storage.grads <= share
    assert storage.states <= 2 * share


# ---- groups


def shard_on_two_meshes(model: nn.Module, tools: Tools) -> nn.Module:
    first = world_mesh()
    second = DeviceMesh.from_group(dist.new_group(), "cpu")
    for index, block in enumerate(blocks_of(model)):
        tools.shard(block, mesh=(first, second)[index % 2])
    tools.shard(model, mesh=first)
    return tools.compile(model)


@pytest.mark.slow
@two_ranks
def test_trains_modules_on_two_groups_of_all_ranks() -> None:
    check(replace(REGRESSION, prepare=shard_on_two_meshes))


def shard_on_meshes_of_two_sizes(model: nn.Module, tools: Tools) -> nn.Module:
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "own"))
    blocks = list(blocks_of(model))
    tools.shard(blocks[0], mesh=grid["own"])
    tools.shard(blocks[1], mesh=grid["all"])
    tools.shard(model, mesh=grid["all"])
    return tools.compile(model)


@two_ranks
def test_trains_modules_on_meshes_of_two_sizes() -> None:
    check_bitwise(replace(REGRESSION, prepare=shard_on_meshes_of_two_sizes))


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, only_shard])
def test_trains_on_a_mesh_of_one_rank(prepare: Prepare) -> None:
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "own"))["own"]
    check_bitwise(replace(ONE_BLOCK, prepare=prepare, shard_kwargs={"mesh": own}))


@pytest.mark.slow
@fresh_ranks
def test_trains_in_a_new_process_group_after_the_old_one_was_destroyed() -> None:
    check(REGRESSION)
    dist.destroy_process_group()
    join_group("second")
    check(REGRESSION)


@two_ranks
@pytest.mark.parametrize("in_place", [True, False])
def test_refuses_to_step_replicas_beside_a_block_compiled_alone(in_place: bool) -> None:
    model = MLP()
    if in_place:
        model.blocks[0].compile(backend="fxshard", options=EAGER)
    else:
        model.blocks[0] = compile_module(model.blocks[0], options=EAGER)
    optim = adamw(model.parameters())
    squared_error(model, *rows()(0, dist.get_rank())).backward()
    before = model.head.weight.detach().clone()
    with pytest.raises(FxshardError, match=r"head\.weight"):
        optim.step()
    torch.testing.assert_close(model.head.weight.detach(), before, rtol=0.0, atol=0.0)


@two_ranks
def test_returns_the_modules_that_it_was_given() -> None:
    model = MLP()
    blocks = list(model.blocks)
    assert fxshard.fully_shard(blocks, mesh=world_mesh()) == blocks
    assert fxshard.fully_shard(model, mesh=world_mesh()) is model
    assert isinstance(model, MLP)
    assert isinstance(model, fxshard.ShardedModule)
    assert isinstance(model.blocks[0], Block)


@pytest.mark.slow
@two_ranks
def test_changes_reshard_after_forward_between_steps() -> None:
    def change(run: Run, step: int) -> None:
        if run.system.fully_shard is not None and step > 0:
            set_reshard_after_forward = run.model.set_reshard_after_forward
            assert callable(set_reshard_after_forward)
            set_reshard_after_forward(step == 1)

    check(replace(REGRESSION, before_step=change))
    check(replace(REGRESSION, before_step=change, prepare=only_shard))
