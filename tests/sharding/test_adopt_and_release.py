"""Everything that FSDP2 was told goes to fxshard and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp import fully_shard as fsdp2

import fxshard
from fxshard import torch_fsdp2
from tests.numerics.comms import CountingGather
from tests.ranks import two_ranks

Setting = Callable[[Any], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.shift = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) + self.shift

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def hook(grad: torch.Tensor) -> None:
    """Change nothing."""


SETTINGS: dict[str, Setting] = {
    "requires_gradient_sync": lambda m: m.set_requires_gradient_sync(False),
    "requires_all_reduce": lambda m: m.set_requires_all_reduce(False),
    "is_last_backward": lambda m: m.set_is_last_backward(False),
    "reshard_after_backward": lambda m: m.set_reshard_after_backward(False),
    "reshard_after_forward": lambda m: m.set_reshard_after_forward(True, recurse=False),
    "separate_reduce_scatter_group": lambda m: m.set_separate_reduce_scatter_group(True),
    "reduces_unused": lambda m: m.set_reduce_scatter_unused_params(True),
    "gradient_divide_factor": lambda m: m.set_gradient_divide_factor(3.0),
    "sums_only": lambda m: m.set_force_sum_reduction_for_comms(True),
    "all_reduce_hook": lambda m: m.set_all_reduce_hook(hook),
    "comms": lambda m: m.set_custom_all_gather(CountingGather()),
    "forward_prefetch": lambda m: m.set_modules_to_forward_prefetch([m.first, m.last]),
    "backward_prefetch": lambda m: m.last.set_modules_to_backward_prefetch([m.first]),
    "forward_methods": lambda m: register_fsdp_forward_method(m, "encode"),
}
SINCE = {
    "separate_reduce_scatter_group": "set_separate_reduce_scatter_group",
    "reduces_unused": "set_reduce_scatter_unused_params",
    "comms": "set_custom_all_gather",
}


def told(model: nn.Module) -> list[dict[str, Any]]:
    """What each unit of FSDP2's was told, by the names of `SETTINGS`."""
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for unit in torch_fsdp2.units_of(model):
        facts = {name: getattr(unit, name) for name in SETTINGS if hasattr(unit, name)}
        facts["comms"] = {kind: type(comm).__name__ for kind, comm in facts["comms"].items()}
        for direction in ("forward", "backward"):
            facts[f"{direction}_prefetch"] = [names[id(module)] for module in unit.prefetched(direction)]
        facts["forward_methods"] = [name for module in unit.modules for name, _ in torch_fsdp2.forward_methods(module)]
        facts["is_last_backward"] |= model not in unit.modules  # the root's counts for all
        found.append(facts)
    return found


def sharded(name: str) -> nn.Module:
    model = Net()
    mesh = init_device_mesh("cpu", (2,))
    if name in ("requires_all_reduce", "all_reduce_hook"):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for part in (model.first, model.last, model):
        fsdp2(part, mesh=mesh)
    return model


@two_ranks
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_goes_there_and_back(name: str) -> None:
    if not hasattr(FSDPModule, SINCE.get(name, "reshard")):
        return  # of a later torch
    model, plain = sharded(name), told(sharded(name))
    SETTINGS[name](model)
    before = told(model)
    assert before != plain
    model = fxshard.release(fxshard.adopt(model))
    assert told(model) == before
