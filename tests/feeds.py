"""Tensor-parallel blocks for the tests of passes: few nodes, and DTensor called by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.graphs import WIDTH, Layers, Traced, layers_of, trace, traced_once


class Feed(nn.Module):
    """A block of sequence parallelism, in plain calls: each rank has some of the rows, and some of the features."""

    mesh: DeviceMesh

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def split(self, mesh: DeviceMesh) -> None:
        """Make it tensor-parallel over the ranks of `mesh`."""
        self.mesh = mesh
        for name, placement in {"scale": Replicate(), "up": Shard(1), "down": Shard(0)}.items():
            setattr(self, name, nn.Parameter(distribute_tensor(getattr(self, name).detach(), mesh, [placement])))

    def forward(self, x: Tensor) -> Tensor:
        rows: Any = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False) * self.scale
        features: Any = torch.relu(rows.redistribute(placements=[Replicate()]) @ self.up)
        return (features @ self.down).redistribute(placements=[Shard(0)]).to_local()


class FeedsBehind(Layers):
    """Calls blocks of sequence parallelism behind a module that is no unit of its own."""

    def __init__(self, first: nn.Module, count: int) -> None:
        super().__init__(0)
        self.first = first
        self.layers = nn.ModuleList(Feed() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


def split(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make all blocks in `module` tensor-parallel over the ranks of `mesh`."""
    for feed in module.modules():
        if isinstance(feed, Feed):
            feed.split(mesh)


@traced_once
def tensor_parallel(count: int = 2, **kwargs: Any) -> Traced:
    """Units of a vector and two matrices, which are DTensors already."""
    return trace(FeedsBehind(nn.Identity(), count), units=layers_of, parallelize=split, **kwargs)
