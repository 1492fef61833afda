"""Refuse optimizer steps on models that fxshard was to shard and never saw."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fxshard.compile import dynamo
from fxshard.compile.one_line import fsdp2_or_ddp
from fxshard.errors import ConfigError
from fxshard.live_objects import instances_of
from fxshard.options import launched_world_size
from fxshard.sharding.sharded_module import units_under


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
        # A step in backward is one for each parameter: of sharded ones alone nothing is searched.
        models = instances_of(nn.Module, thaw=False) if fsdp2_or_ddp.may_have(parameters) else []
        fsdp2_or_ddp.refuse_compiled(parameters, models)
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
