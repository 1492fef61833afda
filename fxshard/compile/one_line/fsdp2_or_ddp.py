"""Refuse to compile a model that FSDP2 has sharded, or one in DistributedDataParallel, and say what to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fxshard.compile import dynamo
from fxshard.errors import ConfigError
from fxshard.live_objects import instances_of
from fxshard.sharding.sharded_module import plain_module


def refuse(roots: Sequence[nn.Module]) -> None:
    """Raise a ConfigError if torch's `fully_shard` or DDP has one of `roots`, or something in it or around it."""
    for root in roots:
        for kind, advice in _ADVICE.items():
            if (taken := _around(root, kind)) is not None:
                raise ConfigError(advice(taken))


def may_have(parameters: Sequence[Tensor]) -> bool:
    """Whether an FSDP2 or DDP model may train the parameters: FSDP2 makes a class for each, DDP's are whole."""
    return bool(FSDPModule.__subclasses__()) or not all(isinstance(p, DTensor) for p in parameters)


def refuse_compiled(parameters: Sequence[Tensor], models: Sequence[nn.Module]) -> None:
    """Raise a ConfigError if fxshard compiles one of `models`, unseen, for which FSDP2 or DDP has `parameters`."""
    wanted = {id(p) for p in parameters}

    def has(model: nn.Module) -> bool:
        return any(id(p) in wanted for p in model.parameters())

    for kind, advice in _ADVICE.items():
        is_taken = any(kind in type(model).__mro__ and has(model) for model in models)
        for model in models if is_taken else ():
            compiled = dynamo.is_compiled_by_us(model) and has(model)
            if compiled and (found := _around(model, kind)) is not None:
                raise ConfigError(advice(found))


def _around(root: nn.Module, kind: type[Any]) -> Any:
    """Return the outermost live module of a class that contains `root` or is inside of it."""
    inside = {id(module) for module in root.modules()}
    found: list[nn.Module] = [
        module
        for module in instances_of(kind, thaw=False)
        if id(module) in inside or any(child is root for child in module.modules())
    ]
    return max(found, key=lambda module: sum(1 for _ in module.modules()), default=None)


def _adopt(fsdp2: nn.Module) -> str:
    return (
        f"{type(fsdp2).__name__.removeprefix('FSDP')} is sharded by torch's fully_shard. Let fxshard take it over "
        'before compiling it: model = torch.compile(fxshard.adopt(model), backend="fxshard")'
    )


def _leave_out(ddp: nn.Module) -> str:
    module = plain_module(cast(DistributedDataParallel, ddp).module)
    return (
        f"{type(module).__name__} is inside of DistributedDataParallel, which reduces its gradients already. Leave "
        "DistributedDataParallel out: fxshard shards the model and reduces them itself."
    )


_ADVICE: dict[type[Any], Callable[[nn.Module], str]] = {FSDPModule: _adopt, DistributedDataParallel: _leave_out}
