"""OutlineRegions: tensor-parallel blocks are called with their collectives inside."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

from fxshard.ir import launches, meshes, regions
from fxshard.ir.text import graph_text
from fxshard.passes.pipeline import default
from tests import feeds, graphs
from tests.graphs import assert_golden, layers_of
from tests.nodes import regions_called

meshes_are_inputs = pytest.mark.skipif(
    not meshes.ARE_INPUTS, reason="before torch 2.13 functions that Dynamo makes hide the mesh"
)


@meshes_are_inputs
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_calls_tensor_parallel_layers_with_what_they_launch(kind: str) -> None:
    traced = feeds.tensor_parallel(count=3, pipeline=default(lower="eager"))
    (name,) = set(regions_called(traced.history.stages["dynamo"]["outline_regions"].graph))
    assert name.startswith("Feed:")
    graph = traced.history.last(kind).graph
    (code,) = regions.codes_in(graph)
    assert_golden(graph_text(code.graph), f"outline_regions_tensor_parallel_{kind}")
    own = [launch.text.partition(" ")[0] for launch in launches.sequence(graph) if not launch.serves]
    of_one = {"forward": ["all_gather", "reduce_scatter"], "backward": ["all_gather", "reduce_scatter", "all_reduce"]}
    assert own == 3 * of_one[kind]


@meshes_are_inputs
def test_tells_layers_on_other_meshes_and_with_other_placements_apart() -> None:
    def parallelize(module: nn.Module, mesh: DeviceMesh) -> None:
        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "another"))["another"]
        layers: Any = module.get_submodule("layers")
        for i, feed in enumerate(layers):
            feed.split(other if i == 1 else mesh)
        third: Any = layers[2]
        third.down = nn.Parameter(third.down.redistribute(placements=[Replicate()]).detach())

    model = feeds.FeedsBehind(nn.Identity(), 5)
    traced = graphs.trace(model, units=layers_of, parallelize=parallelize, pipeline=default(lower="eager"))
    assert len(regions_called(traced.history.stages["dynamo"]["outline_regions"].graph)) == 2
