"""What a call of a sharded module does to its arguments and result: it waits for collectives, and casts.

torch wraps what a functional collective returns (`AsyncCollectiveTensor`), which tensor parallelism gives from one
module to the next, and waits where somebody reads it. As an input of a compiled function the wrapper is a class of its
own: the function is compiled once more for it, is not cached on disk, and its backward hands a plain tensor to the
DTensor that the input was made of (torch 2.11 to 2.15).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from fxshard import torch_private


def _cast(dtype: torch.dtype, values: Any) -> Any:
    """Cast floating-point tensors in all containers that FSDP2 looks into, dataclasses among them."""
    return torch_private.apply_to_tensors(lambda x: x.to(dtype) if torch.is_floating_point(x) else x, values)


def cast_inputs(policy: MixedPrecisionPolicy, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast floating-point tensors among the arguments of a call to the dtype of the parameters."""
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    return (args, kwargs) if dtype is None else _cast(dtype, (args, kwargs))


def cast_output(policy: MixedPrecisionPolicy, output: Any) -> Any:
    """Cast floating-point tensors in the result of a call to the dtype that the policy wants."""
    return output if policy.output_dtype is None else _cast(policy.output_dtype, output)


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
