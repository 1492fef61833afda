"""The backend's entry: what it keeps and warns about, what a changed policy does, and which options Inductor gets."""

from __future__ import annotations

import gc
import logging
import pickle
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.compile import inductor
from fxshard.compile.inductor import Partitioner
from fxshard.compile.stages import Stages
from fxshard.compile.variants import Compilation
from fxshard.options import KEEP_ORDER_FLAGS, Options
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
        return self.large(x)


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
    frame = next(frame for unit in units_under(model) for frame in unit.step.frames)

    def partitioner(options: Options, of: Frame = frame) -> Partitioner:
        stages = Stages(of, DEFAULT, options)
        return Partitioner(stages, Compilation(stages))

    same, other = partitioner(Options()), partitioner(Options(inductor={"max_autotune": True}))
    assert same.uuid() == partitioner(Options()).uuid() != other.uuid()
    assert deepcopy(same).uuid() == same.uuid()
    assert same.uuid().encode() in pickle.dumps(same)


def test_inductor_has_the_flags_that_keep_the_order() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    flags = ["reorder_for_peak_memory", "reorder_for_compute_comm_overlap", "reorder_for_locality"]
    if version >= (2, 15):
        flags += ["reorder_for_locality_in_training", "aten_distributed_optimizations.enable_simple_overlap"]
    assert inductor.order_patches(inductor_config.get_config_copy()) == dict.fromkeys(flags, False)


def test_a_flag_that_torch_should_have_is_missed_aloud_and_once(caplog: pytest.LogCaptureFixture) -> None:
    known = KEEP_ORDER_FLAGS.keys() - {"reorder_for_locality"}
    for _ in range(2):
        assert inductor.order_patches(known).keys() == known
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "has no torch._inductor.config.reorder_for_locality. " in record.getMessage()


def test_a_flag_of_a_later_torch_is_not_missed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KEEP_ORDER_FLAGS, "of_later", "99.0")
    assert "of_later" not in inductor.order_patches(inductor_config.get_config_copy())
    assert caplog.records == []
