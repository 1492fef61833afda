"""What a call of a sharded module does to its arguments and result: it waits for collectives, and casts.

torch wraps what a functional collective returns (`AsyncCollectiveTensor`), which tensor parallelism gives from one
module to the next, and waits where somebody reads it. As an input of a compiled function the wrapper is a class of its
own: the function is compiled once more for it, is not cached on disk, and its backward hands a plain tensor to the
DTensor that the input was made of (torch 2.11 to 2.15).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map


def _cast(dtype: torch.dtype, values: Any) -> Any:
    """Cast floating-point tensors in containers and in dataclasses."""
    return tree_map(functools.partial(_cast_one, dtype), values)


def _cast_one(dtype: torch.dtype, value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        cast_ones = {name: _cast(dtype, each) for name, each in given.items()}
        return dataclasses.replace(value, **cast_ones)
    is_float = isinstance(value, Tensor) and torch.is_floating_point(value)
    return value.to(dtype) if is_float and value.dtype != dtype else value


def cast_inputs(policy: MixedPrecisionPolicy, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast floating-point tensors among the arguments of a call to the dtype of the parameters."""
    if not policy.cast_forward_inputs or policy.param_dtype is None:
        return args, kwargs
    return cast("tuple[Any, Any]", _cast(policy.param_dtype, (args, kwargs)))


def cast_output(policy: MixedPrecisionPolicy, output: Any) -> Any:
    """Cast floating-point tensors in the result of a call to the dtype that the policy wants."""
    if policy.output_dtype is None:
        return output
    return _cast(policy.output_dtype, output)


def awaited(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with plain tensors for those that a collective fills."""
    if not any(map(_is_under_way, (*args, *kwargs.values()))):
        return args, kwargs
    return tuple(map(_awaited, args)), {name: _awaited(value) for name, value in kwargs.items()}


def _is_under_way(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value) is not Tensor and hasattr(value, "trigger_wait")


def _awaited(value: Any) -> Any:
    return _Wait.apply(value) if _is_under_way(value) else value  # type: ignore[no-untyped-call]


class _Wait(torch.autograd.Function):
    """Wait for the collective; backward passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, given: Any) -> Tensor:
        plain: Tensor = given.trigger_wait()
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]
