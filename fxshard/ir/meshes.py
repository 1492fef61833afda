"""Device meshes and DTensors in Dynamo's graph: what code takes from a mesh, and so what decides it.

Code that DTensors were traced into names the process groups of a mesh, and the place of this rank in them: which part
of a split it has, which rows of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard import torch_private

ARE_INPUTS = hasattr(DeviceMesh, "_stable_hash")
"""Whether a mesh is an input of Dynamo's graph, as with torch 2.13; before, functions that Dynamo makes hide it."""


class MeshAxis(NamedTuple):
    """One axis of a mesh, as this rank sees it."""

    name: str
    size: int
    rank: int  # the place of this rank, -1 where it has none
    group: str  # name of the process group, empty where it is in none


def mesh_of(node: fx.Node) -> DeviceMesh | None:
    """Return the mesh that a node of Dynamo's graph stands for; `None` for any other node."""
    value = node.meta.get("example_value")
    value = getattr(value, "real_obj", value)
    return value if isinstance(value, DeviceMesh) else None


def axes_of(meshes: Iterable[DeviceMesh]) -> tuple[MeshAxis, ...]:
    """Return the axes of meshes, each once, and of what was flattened of them: a redistribution may take those."""
    found: dict[MeshAxis, None] = {}
    for given in meshes:
        for mesh in (given, *given._get_root_mesh()._flatten_mapping.values()):
            names, coordinate = mesh.mesh_dim_names or [""] * mesh.ndim, mesh.get_coordinate()
            for i, name in enumerate(names):
                rank, group = (-1, "") if coordinate is None else (coordinate[i], mesh.get_group(i).group_name)
                found.setdefault(MeshAxis(name, mesh.size(i), rank, group))
    return tuple(found)


def is_static(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape of numbers and is made of no others, or is a DTensor of such a part."""
    if not isinstance(tensor, DTensor):
        return torch_private.is_plain_and_static(tensor)
    return all(type(size) is int for size in (*tensor.shape, *tensor.stride())) and is_static(tensor._local_tensor)
