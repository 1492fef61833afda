"""An optimizer's tensors in the memory order of their parameters.

[Note: memory order]
A parameter that is cut along another dimension than the first lies in its flat with that dimension first, so its local
tensor is not contiguous. What an optimizer makes for it is alike. What comes from elsewhere is not: state of a file or
of FSDP2, and all that there is when `adopt` or `release` moves the parameter to other memory. Fused kernels walk
through the memory of parameter, gradient and state side by side, and on the CPU torch does not check that the orders
agree.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxshard.runtime.parameters import local_of


@torch.no_grad()
def lay_as_parameters(optimizer: Optimizer) -> None:
    """Give gradients and state the strides of their parameters; see [Note: memory order]."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)):
        like = local_of(parameter)
        if isinstance(parameter.grad, DTensor) and _lies_otherwise(parameter.grad, like):
            parameter.grad = _laid(parameter.grad, like)
        state = optimizer.state.get(parameter, {})
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and _lies_otherwise(value, like):
                state[name] = _laid(value, like)


def _lies_otherwise(value: Tensor, like: Tensor) -> bool:
    local = local_of(value) if isinstance(value, DTensor) else value
    return local.shape == like.shape and local.stride() != like.stride() and local.numel() > 0


def _laid(value: Tensor, like: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)
    return DTensor(_laid(local_of(value), like), value._spec, requires_grad=False)
