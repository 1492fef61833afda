"""The backend's entry: what it keeps, what it warns about, what a changed policy does to compiled code."""

from __future__ import annotations

import gc
import logging
import pickle
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.compile.inductor import Partitioner
from fxshard.compile.stages import Stages
from fxshard.compile.variants import Compilation
from fxshard.options import Options
from fxshard.passes.pipeline import DEFAULT
from fxshard.runtime.frame import Frame
from fxshard.sharding.sharded_module import units_under
from tests.numerics.harness import EAGER, compile_module


class BrokenInTwo(nn.Module):
    """A unit of two layers with a graph break between a small and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.small(x)
        torch._dynamo.graph_break()
        result: Tensor = self.large(x)
        return result


def sharded_pair(mesh: DeviceMesh) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    fxshard.fully_shard(model[0], mesh=mesh)
    return fxshard.fully_shard(model, mesh=mesh)


def gathers(model: nn.Module) -> list[tuple[str, int]]:
    return [(graph.kind, graph.collectives.get("all_gather", 0)) for graph in fxshard.compiled_graphs(model)]


def test_warns_where_a_graph_gathers_a_unit_and_reads_little_of_it(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    model = fxshard.fully_shard(BrokenInTwo(), mesh=mesh)
    with caplog.at_level(logging.WARNING, logger="fxshard"):
        compile_module(model, options=EAGER)(torch.ones(2, 4))
    assert [r.getMessage() for r in caplog.records if "reads 4% of unit 'root'" in r.getMessage()]


def test_a_changed_reshard_policy_compiles_graphs_that_follow_it(mesh: DeviceMesh) -> None:
    model = sharded_pair(mesh)
    compiled = compile_module(model, options=EAGER)
    compiled(torch.ones(2, 4)).sum().backward()
    assert gathers(compiled) == [("forward", 2), ("backward", 0)]  # backward needs no weight of the first layer
    assert isinstance(model, fxshard.ShardedModule)
    model.set_reshard_after_forward(True)
    compiled(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert gathers(compiled)[2:] == [("forward", 2), ("backward", 2)]


def test_refuses_a_reshard_policy_that_is_not_a_bool(mesh: DeviceMesh) -> None:
    with pytest.raises(fxshard.ConfigError, match="reshard_after_forward must be a bool, got 2"):
        fxshard.ShardedModule.set_reshard_after_forward(sharded_pair(mesh), 2)  # type: ignore[arg-type]


def test_keeps_no_graph_that_dynamo_has_dropped(mesh: DeviceMesh) -> None:
    model = sharded_pair(mesh)
    compile_module(model, options=EAGER)(torch.ones(2, 4))
    assert fxshard.compiled_graphs(model)
    torch._dynamo.reset()
    gc.collect()
    assert fxshard.compiled_graphs(model) == []


def test_inductor_keys_its_cache_on_the_digest_of_options_plan_and_passes(mesh: DeviceMesh) -> None:
    model = sharded_pair(mesh)
    compile_module(model, options=EAGER)(torch.ones(2, 4))
    frame = next(frame for unit in units_under(model) for frame in unit.frames)

    def partitioner(options: Options, of: Frame = frame) -> Partitioner:
        stages = Stages(of, DEFAULT, options)
        return Partitioner(stages, Compilation(stages))

    same, other = partitioner(Options()), partitioner(Options(inductor={"max_autotune": True}))
    assert same.uuid() == partitioner(Options()).uuid() != other.uuid()
    assert deepcopy(same).uuid() == same.uuid()
    assert same.uuid().encode() in pickle.dumps(same)
