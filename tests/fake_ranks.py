"""Ranks that do not exist, for graphs that are only traced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

_fresh = itertools.count()


def split_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the slice of a mesh of `fake_ranks` that is for tensor parallelism."""
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[-1]]


@contextmanager
def fake_ranks(world_size: int, replicas: int = 1, *, tensor_parallel: int = 1) -> Iterator[DeviceMesh]:
    """Pretend to be rank 0 of `world_size`, or of so many replicas, or of groups of tensor parallelism.

    Collectives return at once and move nothing.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size * replicas * tensor_parallel)
    try:
        if tensor_parallel > 1:
            # A name of its own: torch keeps what it knows of DTensors by mesh, and then traces otherwise.
            names = ("shard", f"tp_{next(_fresh)}")
            yield init_device_mesh("cpu", (world_size, tensor_parallel), mesh_dim_names=names)
        elif replicas > 1:
            yield init_device_mesh("cpu", (replicas, world_size), mesh_dim_names=("replicate", "shard"))
        else:
            yield init_device_mesh("cpu", (world_size,))
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()
