"""What a plan says that all_gathers bring and hold, against what they held in a run."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fxshard
from fxshard.hardware import HardwareSpec, load
from fxshard.plan.outline import outline
from fxshard.plan.plan import FSDP2, FXSHARD, PlanSettings
from fxshard.plan.run import PlannedSchedule, cost_of
from fxshard.testing import emulated_link
from fxshard.testing.emulated_link import EmulatedLink
from tests.models import Doing, FeedForward

RANKS, ROWS, WIDTH, LAYERS = 4, 8, 64, 3
DEVICE = load("cpu")
SEVERAL = dataclasses.replace(DEVICE, gather_tensor_overhead=1e-9)
"""Where each parameter is gathered as a tensor of its own."""


class Model(nn.Module):
    """Blocks between a first product, which is large, and a last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4096 + WIDTH)
        self.blocks = nn.ModuleList(FeedForward(WIDTH, 2 * WIDTH) for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)[..., :WIDTH]
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def whole() -> nn.Module:
    first, last = (FeedForward(WIDTH, 2 * WIDTH) for _ in range(2))
    return Doing(lambda m, x: m.last(torch.tanh(m.first(x))).square().mean(), first=first, last=last)


def planned(
    model: nn.Module, device: HardwareSpec, schedule: PlannedSchedule, accumulation: int, **options: Any
) -> int:
    settings = PlanSettings(param_dtype=torch.float32, accumulation=accumulation, reduces_each=False)
    given = {**settings.options(device, schedule), "lower": "eager", **options}
    traced = outline(model, (torch.empty(ROWS, WIDTH),), {}, world_size=RANKS, options=given, saves_all=True)
    return cost_of(traced, device, schedule, tokens=ROWS, **settings.run).gathered


def measured(model: nn.Module, shard: Callable[[Any, EmulatedLink], Any], accumulation: int) -> int:
    torch._dynamo.reset()
    with emulated_link(RANKS) as link:
        run, x = shard(model, link), torch.ones(ROWS, WIDTH)
        for _ in range(3):  # what comes next is guessed from the third step on
            link.clear()
            for i in range(accumulation):
                model.set_requires_gradient_sync(i == accumulation - 1)  # type: ignore[operator] # sharded by now
                run(x).backward()
            model.zero_grad()
        return link.gathered_peak_bytes


@pytest.mark.parametrize(
    ("model", "device", "accumulation", "options"),
    [
        pytest.param(Model, DEVICE, 1, {}, id="block by block"),
        pytest.param(Model, SEVERAL, 2, {"bucket": 0.03}, id="several launches of a block, two microbatches"),
        pytest.param(Model, DEVICE, 1, {"reshard_after_forward": False}, id="kept for backward"),
        pytest.param(whole, SEVERAL, 1, {"regional": False}, id="whole graph"),
    ],
)
def test_as_many_bytes_are_gathered_at_once_as_planned(
    model: Callable[[], nn.Module], device: HardwareSpec, accumulation: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    reshards = {name: value for name, value in options.items() if name == "reshard_after_forward"}
    others = {"regional": True, "schedule": "auto", **options, "lower": "eager", "hardware": device.to_json()}

    def shard(sharded: nn.Module, link: EmulatedLink) -> Any:
        for block in getattr(sharded, "blocks", ()):
            fxshard.fully_shard(block, mesh=link.mesh, **reshards)
        fxshard.fully_shard(sharded, mesh=link.mesh)
        given = {name: value for name, value in others.items() if name not in reshards}
        return torch.compile(sharded, backend="fxshard", options=given)

    there = planned(model(), device, FXSHARD, accumulation, **{k: v for k, v in options.items() if k != "regional"})
    assert there == measured(model(), shard, accumulation)


@pytest.mark.parametrize("reshards", [True, False])
def test_fsdp2_gathers_as_many_bytes_at_once_as_planned(reshards: bool) -> None:
    def shard(sharded: Any, link: EmulatedLink) -> Any:
        units = [sharded, *sharded.blocks]
        for unit in reversed(units):
            torch_fully_shard(unit, mesh=link.mesh, reshard_after_forward=None if unit is sharded else reshards)
        sharded._set_unshard_async_op(True)
        for unit, following in itertools.pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
        return sharded

    there = planned(Model(), DEVICE, FSDP2, 1, reshard_after_forward=reshards)
    assert there == measured(Model(), shard, 1)
