"""`dp_mesh_dims`: parameters that are DTensors on all axes of a mesh train as FSDP2 trains them."""

from __future__ import annotations

import pytest

from fxshard import torch_fsdp2
from tests.numerics import whole_mesh
from tests.state import processes

DEFAULT = ("placements", "compiled")

pytestmark = pytest.mark.skipif(not torch_fsdp2.HAS_MESH_DIMS, reason="this torch has no DataParallelMeshDims")


@pytest.mark.multi_rank
def test_trains_as_fsdp2() -> None:
    processes.run(4, whole_mesh.run, *DEFAULT)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in whole_mesh.BODIES if name not in DEFAULT])
def test_trains_as_fsdp2_also(name: str) -> None:
    processes.run(4, whole_mesh.run, name)
