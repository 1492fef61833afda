"""Schedules whose times are easily worked out by hand."""

from __future__ import annotations

import torch
from torch import fx

from fxshard.hardware import HardwareSpec
from fxshard.ir.plan import FramePlan
from tests.cost.big import WORLD_SIZE as RANKS
from tests.cost.big import Builder

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

PRODUCT, TRANSFER = 3.0, 7.0
"""Seconds of `product` and of gathering `flat`: 2 * 24 * 64 * 64 FLOP; 1 s latency and 3/4 of 16 KiB at 2 KiB/s."""

HARDWARE = HardwareSpec(
    name="test",
    peak_flops={"f32": 2.0**16},
    memory_bandwidth=2.0**60,
    link_latency=1.0,
    link_bandwidth=2048.0,
    memory_gib=1,
    kernel_overhead=0.0,
    gather_tensor_overhead=0.0,
    reduce_tensor_overhead=0.0,
)
NO_PLAN = FramePlan(units={}, shard_inputs={})


class HandMade(Builder):
    """Three matrices to multiply and a flat to gather."""

    def __init__(self, *, dynamic: bool = False) -> None:
        super().__init__(dynamic=dynamic)
        self.x, self.flat = self.input("x", (24, 64)), self.input("flat", (1024,))
        self.weight = self.call(aten.view.default, self.input("w", (64 * 64,)), [64, 64])

    def launch(self, group: str = "0") -> fx.Node:
        return self.call(c10d.all_gather_into_tensor.default, self.flat, RANKS, group)

    def product(self) -> fx.Node:
        self.x = self.call(aten.mm.default, self.x, self.weight)
        return self.x
