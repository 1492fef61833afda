"""Refuse models that somebody else shards (FSDP2, DistributedDataParallel), and steps on those that nobody does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fxshard.compile import dynamo
from fxshard.errors import ConfigError
from fxshard.live_objects import instances_of
from fxshard.options import launched_world_size
from fxshard.sharding.sharded_module import plain_module, units_under


def refuse_taken(roots: Sequence[nn.Module]) -> None:
    """Raise a ConfigError if torch's `fully_shard` or DDP has one of `roots`, or something in it or around it."""
    for root in roots:
        for kind, advice in _ADVICE.items():
            if (taken := _around(root, kind)) is not None:
                raise ConfigError(advice(taken))


def _refuse_compiled(parameters: Sequence[Tensor], models: Sequence[nn.Module]) -> None:
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


@functools.cache
def guard_optimizers() -> RemovableHandle:
    """Refuse, from now on, an optimizer step that would train an unsynchronised replica.

    Installed when fxshard is imported: a model of which Dynamo captures nothing never comes to the backend. It is the
    one hook that is always there; `guard_optimizers().remove()` takes it away.
    """
    return register_optimizer_step_pre_hook(_ReplicaGuard())


class _ReplicaGuard:
    """Refuses to step what fxshard was to train and never saw: replicas, and models that FSDP2 still has."""

    def __init__(self) -> None:
        # The search for the model is made once per optimizer. A model that was never given to us may be a reference,
        # a small helper, or under DDP.
        self._approved: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # Dynamo cannot trace the search: a compiled step is not checked
            return
        ranks = dist.get_world_size() if dist.is_initialized() else launched_world_size()
        if optimizer in self._approved or ranks == 1:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # A step in backward is one for each parameter: of sharded ones alone, and not FSDP2's, nothing is searched.
        may_be_taken = bool(FSDPModule.__subclasses__()) or not all(isinstance(p, DTensor) for p in parameters)
        models = instances_of(nn.Module, thaw=False) if may_be_taken else []
        _refuse_compiled(parameters, models)
        if replicas := _replicas([p for p in parameters if not isinstance(p, DTensor)], models):
            raise ConfigError(
                f"optimizer step on parameters that are not sharded: {', '.join(replicas)}. Their model was not "
                "captured with backend='fxshard', or only in part (compiled in part, split by graph breaks: "
                "TORCH_LOGS=graph_breaks, or called where Dynamo does nothing: in torch.func transforms, under a "
                "TorchDispatchMode such as FlopCounterMode), so their gradients were never averaged over the ranks. "
                "Compile the outermost module, or call fxshard.fully_shard(model) before compiling, after "
                "torch.distributed.init_process_group()."
            )
        self._approved.add(optimizer)


def _replicas(parameters: Iterable[Tensor], models: Iterable[nn.Module]) -> list[str]:
    """Return the FQNs of those with a sharded module beside them or fxshard around them that are not ignored."""
    wanted = {id(p) for p in parameters}
    found: dict[int, str] = {}
    for model in models if wanted else ():  # of any program that imports fxshard
        units = units_under(model)
        ignored = {id(p) for unit in units for p in unit.settings.ignored}
        is_ours = bool(units) or dynamo.is_compiled_by_us(model)
        for name, parameter in model.named_parameters() if is_ours else ():
            if id(parameter) in wanted - ignored and len(name) > len(found.get(id(parameter), "")):
                found[id(parameter)] = name.removeprefix("_orig_mod.")
    return list(found.values())
