"""Models that are given back: what only a device beside the host shows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxshard
from tests.cross_cuda.lane import installed

pytestmark = [
    pytest.mark.cuda_lane,
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]


def test_whole_parameters_of_offloaded_units_stay_on_the_host_and_the_user_is_told() -> None:
    installed()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cuda", (2,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            with torch.device("cuda"):
                model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            fxshard.fully_shard(model[0], mesh=mesh, offload_policy=fxshard.CPUOffloadPolicy())
            fxshard.fully_shard(model, mesh=mesh)
            with pytest.warns(UserWarning, match=r"release\(Sequential, whole=True\): whole parameters of 0 are in"):
                fxshard.release(model, whole=True)
        assert [p.device.type for p in model.parameters()] == ["cpu", "cpu", "cuda", "cuda"]
        assert model[0].weight.shape == (4, 4)
    finally:
        dist.destroy_process_group()
