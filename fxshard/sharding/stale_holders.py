"""Who still has parameters as they were before `fully_shard` took them, and would train copies of them, or nothing.

A module elsewhere may be tied to a sharded one, and an optimizer may have been built too early. Neither is visible
while modules are sharded one by one, bottom-up; so the first call looks, and only where an old parameter is alive.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxshard.errors import ConfigError
from fxshard.live_objects import instances_of
from fxshard.runtime.unit import Unit


def refuse(units: Iterable[Unit]) -> None:
    """Raise if training these units would not train what the user means."""
    units = [unit for unit in units if not unit.settings.from_one_line]
    _refuse_steps_in_backward(units)
    if not _alive(units):
        return
    if _tied_elsewhere(units) or _optimizers(units):
        gc.collect()  # what is found may be dead
    if tied := _tied_elsewhere(units):
        raise ConfigError(
            f"tied parameters of which only one is sharded: {', '.join(tied)}. Each would train a copy of its own. "
            "Give both modules to one call, fully_shard([a, b]), or leave both to the module around them; assign a "
            "clone to one of them if they are not to be shared."
        )
    if found := _optimizers(units):
        raise ConfigError(
            f"an optimizer has parameters as they were before fully_shard: {', '.join(found)}. It would train nothing. "
            "Build it of model.parameters() after fully_shard, and drop this one."
        )


def _alive(units: Iterable[Unit]) -> dict[int, str]:
    """Return id -> FQN of the parameters that trained shards have replaced, as far as somebody holds them."""
    members = [member for unit in units for member in unit.members if member.parameter.requires_grad]
    found = ((member.original(), member.fqn) for member in members)
    return {id(p): fqn for p, fqn in found if p is not None and not isinstance(p, DTensor)}  # `adopt` keeps DTensors


def _tied_elsewhere(units: Iterable[Unit]) -> list[str]:
    alive = _alive(units)
    return [
        f"{alive[id(parameter)]} and {type(module).__name__}.{name}"
        for module in (instances_of(nn.Module, thaw=False) if alive else ())
        for name, parameter in module.__dict__.get("_parameters", {}).items()
        if id(parameter) in alive
    ]


def _optimizers(units: Iterable[Unit]) -> list[str]:
    alive = _alive(units)
    return [
        f"{alive[id(parameter)]} ({type(optimizer).__name__})"
        for optimizer in (instances_of(Optimizer, thaw=False) if alive else ())
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in alive
    ]


def _refuse_steps_in_backward(units: Iterable[Unit]) -> None:
    members = [member for unit in units for member in unit.members]
    if names := [member.fqn for member in members if "_in_backward_optimizers" in member.parameter.__dict__]:
        raise ConfigError(
            f"_apply_optimizer_in_backward of sharded parameters ({', '.join(names)}): its hooks would never run, and "
            "nothing would train. Step in a hook of the parameter instead: "
            "parameter.register_post_accumulate_grad_hook(...)."
        )
