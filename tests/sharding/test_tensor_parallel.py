"""Parameters that are DTensors before they are sharded: what is refused, and what a model of them cannot do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxshard
from fxshard.errors import ConfigError, UnsupportedGraph
from fxshard.state import local_shards
from fxshard.state.ranks import require_one_set
from tests import feeds, graphs
from tests.fake_ranks import fake_ranks, split_axis
from tests.numerics.harness import EAGER, compile_module


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks(2, tensor_parallel=2) as mesh:
        yield mesh


def split(mesh: DeviceMesh, layer: nn.Module | None = None) -> nn.Module:
    model = nn.Sequential(layer or nn.Linear(4, 4))
    return parallelize_module(model, split_axis(mesh), {"0": ColwiseParallel()}, src_data_rank=None)


def test_a_mesh_must_be_a_slice_beside_that_of_the_parameters(mesh: DeviceMesh) -> None:
    other = init_device_mesh("cpu", (4,))
    with pytest.raises(
        ConfigError, match=r"(?s)^0\.weight is a DTensor on the mesh.*no name.*Slice both from one: mesh ="
    ):
        fxshard.fully_shard(split(mesh), mesh=other)
    with pytest.raises(ConfigError, match=r"both have the axis tp"):
        fxshard.fully_shard(split(mesh), mesh=split_axis(mesh))
    with pytest.raises(ConfigError, match=r"both have the axis tp"):
        fxshard.fully_shard(split(mesh), mesh=mesh)


def test_a_parameter_of_sums_to_come_is_refused_by_name(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 4)
    sums = DTensor.from_local(torch.ones(4, 4), split_axis(mesh), [Partial()], run_check=False)
    model.weight = nn.Parameter(sums)
    with pytest.raises(
        ConfigError, match=r"other placements than Shard and Replicate.*weight \(Partial.*ignored_params"
    ):
        fxshard.fully_shard(model, mesh=mesh["shard"])


def test_the_columns_of_a_tensor_parallel_parameter_are_those_that_a_rank_has(mesh: DeviceMesh) -> None:
    model = parallelize_module(nn.Linear(6, 4), split_axis(mesh), RowwiseParallel(), src_data_rank=None)
    with pytest.raises(ConfigError, match=r"Shard\(dim=1\) for weight of shape \[4, 3\].* among the 2 ranks"):
        fxshard.fully_shard(model, mesh=mesh["shard"], shard_placement_fn=lambda p: Shard(p.dim() - 1))


@pytest.mark.parametrize("reshard_after_forward", [None, 2])
def test_explain_tells_what_a_step_does_on_each_axis(reshard_after_forward: int | None) -> None:
    def explained(mesh: DeviceMesh, told: bool) -> fxshard.Explanation:
        model: Any = feeds.FeedsBehind(nn.Linear(4, 4), 2)
        feeds.split(model, split_axis(mesh))
        for unit in graphs.layers_of(model):
            fxshard.fully_shard(unit, mesh=mesh["shard"], reshard_after_forward=reshard_after_forward)
        if told:
            return fxshard.explain(model, torch.ones(4, 4), options={**EAGER, "hardware": "cpu"})
        compiled = compile_module(model, options=EAGER)
        compiled(torch.ones(4, 4)).sum().backward()
        return fxshard.explanation_of(compiled)

    with fake_ranks(4, tensor_parallel=2) as mesh:
        ahead, after = explained(mesh, True), explained(mesh, False)
        axis = split_axis(mesh).mesh_dim_names[0]  # type: ignore[index]
    assert f"world size 4, 2 ranks of {axis}" in repr(ahead)
    for kind in ("forward", "backward"):
        stats, expected = (e.frames[0].stats_of(e.frames[0].running(kind)).evaluate() for e in (ahead, after))
        assert dataclasses.replace(stats, num_nodes=0) == dataclasses.replace(expected, num_nodes=0)  # a mesh is one
        assert stats.collectives[f"{axis} all_gather"] == stats.collectives[f"{axis} reduce_scatter"] == 2
    assert stats.collectives[f"{axis} all_reduce"] == 2
    assert stats.collectives["reduce_scatter"] == 3


def test_one_line_cannot_tell_which_axis_is_to_shard(mesh: DeviceMesh) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)0\.weight.*cannot tell which other axis.*fully_shard\(model, mesh=mesh"
    ):
        compile_module(split(mesh), options=EAGER)(torch.ones(2, 4))


class Writes(nn.Linear):
    """Writes to a view of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.t().mul_(2)
        return super().forward(x)


class WritesBehindABreak(nn.Linear):
    """Writes to its weight in another graph than the one that has gathered it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        torch._dynamo.graph_break()
        with torch.no_grad():
            weight.mul_(2)
        return nn.functional.linear(x, weight, self.bias)


@pytest.mark.parametrize("layer", [Writes, WritesBehindABreak])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_write_to_a_gathered_parameter_is_refused(mesh: DeviceMesh, layer: type[nn.Linear], compiled: bool) -> None:
    model = fxshard.fully_shard(split(mesh, layer(4, 4)), mesh=mesh["shard"])
    with pytest.raises(UnsupportedGraph, match=r"changed in place.*0\.weight"):
        (compile_module(model, options=EAGER) if compiled else model)(torch.ones(2, 4))


def test_only_what_lies_as_it_did_can_take_the_place_of_a_parameter(mesh: DeviceMesh) -> None:
    model: Any = fxshard.fully_shard(split(mesh), mesh=mesh["shard"])
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    on_one_axis = DTensor.from_local(torch.ones(2, 4), mesh["shard"], [Shard(0)], run_check=False)
    with pytest.raises(
        ConfigError, match=r"0\.weight is sharded: it can only be replaced by a DTensor of shape \[4, 4\]"
    ):
        model[0].weight = nn.Parameter(on_one_axis)


@pytest.mark.parametrize("rows", [8, 7, 3, 1])
def test_a_ranks_part_of_a_full_tensor_is_what_it_had_of_it(mesh: DeviceMesh, rows: int) -> None:
    layer = nn.Linear(4, rows)
    full = {name: p.detach().clone() for name, p in layer.named_parameters(prefix="0")}
    model = fxshard.fully_shard(split(mesh, layer), mesh=mesh["shard"])
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        assert local_shards.can_cut(p)
        assert torch.equal(local_shards.own_part(full[name], p), p.to_local())


def test_parameters_beside_tensor_parallel_ones_are_of_one_set_of_ranks(mesh: DeviceMesh) -> None:
    model = fxshard.fully_shard(nn.Sequential(split(mesh), nn.Linear(4, 4)), mesh=mesh["shard"])
    require_one_set(model)
    model.append(
        fxshard.fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"])
    )
    with pytest.raises(ConfigError, match="sharded over several"):
        require_one_set(model)


def test_a_compiled_block_takes_what_a_collective_is_still_filling(mesh: DeviceMesh) -> None:
    """The embedding before it is not compiled; its backward must get the gradient as the DTensor that it gave."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, split_axis(mesh), {"0": rows}, src_data_rank=None)
    for layer in model:
        fxshard.fully_shard(layer, mesh=mesh["shard"])
    given: list[Tensor] = []
    model[1].register_forward_pre_hook(lambda layer, args: given.append(args[0]))
    cast(Any, model[1]).compile(backend="fxshard", options=EAGER)
    model(torch.zeros(2, 2, dtype=torch.int64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert type(given[0]) is Tensor
