"""The group of gloo on which overlapping collectives are launched."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard.modules import units_under
from fxshard.runtime import gloo
from tests.ranks import two_ranks

BURSTS, IN_FLIGHT = 2_000, 8


def gloo_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


@two_ranks
def test_one_thread_works_on_what_units_launch() -> None:
    model = fxshard.fully_shard(nn.Linear(4, 4))
    (unit,) = units_under(model)
    group = gloo.group_of(unit.mesh)
    assert unit.plan.group == group.group_name
    assert group is not dist.group.WORLD
    assert gloo_of(group).options._threads == 1


@two_ranks
def test_is_made_once_per_group_and_keeps_its_ranks_and_timeout() -> None:
    given = dist.new_group([1, 0], timeout=timedelta(seconds=77))
    mesh = DeviceMesh.from_group(given, "cpu")
    group = gloo.group_of(mesh)
    assert group is gloo.group_of(mesh)
    assert group is gloo.group_of(DeviceMesh.from_group(given, "cpu"))
    assert group is not gloo.group_of(init_device_mesh("cpu", (2,)))
    assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(given)
    assert gloo_of(group).options._timeout == timedelta(seconds=77)
    gathered = torch.empty(2)
    dist.all_gather_into_tensor(gathered, torch.full((1,), float(dist.get_rank())), group=group)
    assert gathered.tolist() == [0, 1]


@two_ranks
def test_overlapping_gathers_do_not_kill_the_rank() -> None:
    """On a group with two threads, every other run of this ends in an abort or a segmentation fault."""
    name = gloo.group_of(init_device_mesh("cpu", (2,))).group_name
    ops, sent = torch.ops._c10d_functional, torch.ones(4)
    for _ in range(BURSTS):
        for gathered in [ops.all_gather_into_tensor(sent, 2, name) for _ in range(IN_FLIGHT)]:
            ops.wait_tensor(gathered)


def test_another_backend_is_taken_as_it_is(mesh: DeviceMesh) -> None:
    assert gloo.group_of(mesh) is dist.group.WORLD
