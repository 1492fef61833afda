"""From the gradient of a flat to the `.grad` of the parameters that are views of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard.errors import InvariantError
from fxshard.ir import fake
from fxshard.ir.plan import ShardPlan


class GradientSink:
    """Hands each parameter its slice of the flat's gradient, as autograd would have.

    A parameter that took no part in the backward keeps its `.grad` (None, usually); a first gradient becomes a view of
    the reduced buffer, without a copy; a later one is added. Tensor hooks and post-accumulate hooks of the parameter
    run, in that order.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], plan: ShardPlan) -> None:
        """One sink per flat; `parameters` in slot order."""
        self.parameters = list(parameters)
        self.plan = plan
        # By backward: reentrant checkpointing runs backwards inside of a backward.
        self._expected: dict[int | None, set[int]] = {}

    def expect(self, slots: Iterable[int]) -> None:
        """Say which parameters the running backward gives a gradient, before it arrives."""
        self._expected.setdefault(fake.backward_id(), set()).update(slots)

    def forget(self) -> None:
        """Drop what backwards that never ended (an exception) have announced; called when no backward runs."""
        self._expected.clear()

    def hand_over(self, flat: Tensor) -> None:
        """Post-accumulate-grad hook of the flat; leaves `flat.grad` None."""
        _hand_over_eagerly(self, flat)

    def take(self, flat: Tensor) -> None:
        """Give every expected parameter its slice of `flat.grad`."""
        grad, flat.grad = flat.grad, None
        slots = self._expected.pop(fake.backward_id(), None)
        if grad is None or not slots:
            names = ", ".join(slot.fqn for slot in self.plan.slots)
            raise InvariantError(f"a gradient arrived that no forward announced, for the shard of {names}.")
        pieces = torch.split(grad, [slot.numel for slot in self.plan.slots])
        for i in sorted(slots):
            _give(self.parameters[i], pieces[i])


# A whole train step may be compiled: then Dynamo is on during backward, and must leave our hooks alone.
_hand_over_eagerly = torch.compiler.disable(GradientSink.take)


def _give(parameter: nn.Parameter, piece: Tensor) -> None:
    """Accumulate one parameter's slice, `[slot_numel]`, padding included."""
    local = cast(DTensor, parameter)._local_tensor
    rows = piece if piece.numel() == local.numel() else piece[: local.numel()]
    # The constructor, not from_local: no autograd, no checks, nothing but the wrapper.
    grad: Tensor = DTensor(rows.view(local.shape), cast(DTensor, parameter)._spec, requires_grad=False)
    for hook in (parameter._backward_hooks or {}).values():
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad += grad
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)
