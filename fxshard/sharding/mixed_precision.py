"""The casts of a mixed-precision policy at the border of a module."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map


def _cast(dtype: torch.dtype, value: Any) -> Any:
    is_float = isinstance(value, Tensor) and torch.is_floating_point(value)
    return value.to(dtype) if is_float and value.dtype != dtype else value


def cast_inputs(policy: MixedPrecisionPolicy, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast floating-point tensors among the arguments of a call to the dtype of the parameters."""
    if not policy.cast_forward_inputs or policy.param_dtype is None:
        return args, kwargs
    return cast("tuple[Any, Any]", tree_map(functools.partial(_cast, policy.param_dtype), (args, kwargs)))


def cast_output(policy: MixedPrecisionPolicy, output: Any) -> Any:
    """Cast floating-point tensors in the result of a call to the dtype that the policy wants."""
    if policy.output_dtype is None:
        return output
    return tree_map(functools.partial(_cast, policy.output_dtype), output)
