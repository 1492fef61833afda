"""What the user's functions say of single parameters: in which dtype each is gathered."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fxshard.errors import ConfigError
from fxshard.runtime.parameters import ParameterSettings

Chooser = Callable[[str, nn.Parameter], ParameterSettings]
"""(FQN, parameter before it is sharded) -> what holds for it."""


def like_its_unit(fqn: str, parameter: nn.Parameter) -> ParameterSettings:
    """Choose nothing."""
    return ParameterSettings()


def chooser(mp_policy: MixedPrecisionPolicy) -> Chooser:
    """Return what asks the user's functions, each once per parameter."""
    return lambda fqn, parameter: ParameterSettings(keeps_dtype=_keeps_dtype(fqn, parameter, mp_policy))


def _keeps_dtype(fqn: str, parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> bool:
    override = getattr(policy, "param_dtype_override_fn", None)  # from torch 2.15 on
    dtype = override(parameter) if override is not None else None
    if not isinstance(dtype, torch.dtype | None):
        raise ConfigError(
            f"mp_policy.param_dtype_override_fn must return a torch.dtype or None, for {fqn} it returned {dtype!r}."
        )
    if dtype not in (None, policy.param_dtype, parameter.dtype):
        raise ConfigError(
            f"mp_policy.param_dtype_override_fn returned {dtype} for {fqn}, which is stored in {parameter.dtype}. It "
            f"can be gathered in that, or in param_dtype={policy.param_dtype} (None)."
        )
    return dtype is not None and dtype != policy.param_dtype
