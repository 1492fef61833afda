"""The names of parameters and buffers: those of torch.distributed.checkpoint, which no wrapper changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fxshard.errors import ConfigError
from fxshard.sharding.sharded_module import plain_module

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
"""Keys of an optimizer's state_dict; any other key of it is kept as it is."""

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def fqn_of(model: nn.Module, name: str) -> str:
    """Return a name in the module tree without the steps into wrappers, as `get_model_state_dict` and its kin have it.

    Wrappers of `torch.compile`, activation checkpointing and torch's FSDP have names that nothing else has; `module` is
    one only below `DistributedDataParallel`. A name that lacks a step, as one of another model may, stays as it is.
    """
    steps = [step for step in name.split(".") if step not in _WRAPPERS]
    if "module" not in steps:
        return ".".join(steps)
    parts: list[str] = []
    module: object = model
    for step in steps:
        while (compiled := getattr(module, "_orig_mod", None)) is not None:
            module = compiled
        if not (isinstance(module, DistributedDataParallel) and step == "module"):
            parts.append(step)
        module = getattr(module, step, None)
    return ".".join(parts)


def named_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield FQN and parameter; a tied one under its first name, or under all."""
    pairs = model.named_parameters(remove_duplicate=remove_duplicate)
    return ((fqn_of(model, name), parameter) for name, parameter in pairs)


def module_in(model: object) -> nn.Module:
    """Return the model without the wrapper of `torch.compile`; raise `ConfigError` if it is something else."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, got {type(model).__name__}.")
    return plain_module(model)


def require_optimizer(optim: object) -> None:
    """Raise `ConfigError` unless it is an optimizer."""
    if not isinstance(optim, Optimizer):
        raise ConfigError(f"optim must be a torch.optim.Optimizer, got {type(optim).__name__}.")


@dataclass(frozen=True)
class ParameterNames:
    """The parameters of an optimizer by FQN."""

    parameters: dict[str, nn.Parameter]  # FQN -> parameter, in the order of torch's ids: through the groups
    groups: list[list[str]]  # the FQNs of each param group

    @property
    def ids(self) -> dict[str, int]:
        """FQN -> torch's id."""
        return {fqn: i for i, fqn in enumerate(self.parameters)}


def names_of(model: nn.Module, optim: Optimizer) -> ParameterNames:
    """Name the parameters of `optim`; raise `ConfigError` if it is no optimizer, or one of them is not in `model`."""
    require_optimizer(optim)
    known = {id(parameter): fqn for fqn, parameter in named_parameters(plain_module(model))}
    names = ParameterNames({}, [[] for _ in optim.param_groups])
    unknown = []
    for g, group in enumerate(optim.param_groups):
        for i, parameter in enumerate(group[PARAMS]):
            if (fqn := known.get(id(parameter))) is None:
                unknown.append(f"param_groups[{g}]['params'][{i}] of shape {list(parameter.shape)}")
                continue
            names.parameters[fqn] = parameter
            names.groups[g].append(fqn)
    if unknown:
        raise ConfigError(
            f"the optimizer has parameters that are not in the model: {', '.join(unknown)}. Give both as they are "
            "trained together; if the model was compiled or sharded after the optimizer was made, make it anew."
        )
    return names
