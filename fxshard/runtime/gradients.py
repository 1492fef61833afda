"""From the gradient of a flat to the `.grad` of the parameters that are views of it.

[Note: hand-over]
This runs once per unit and backward, for all parameters of the unit, so what it does per parameter is a call into C:
slices are views of the reduced buffer, wrapped by DTensor's own constructor, and a second gradient is added to all
parameters in one `foreach`. The wrappers are new ones at each step: a user may hold last step's `.grad`. Where a
parameter has hooks, or a `.grad` that is not ours, that unit's parameters go one by one, as autograd would.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard import torch_private
from fxshard.errors import InvariantError, UnsupportedGraph
from fxshard.ir.plan import ShardPlan

if TYPE_CHECKING:
    from fxshard.runtime.late_gradients import LateGradient

_GRAD, _SPEC, _LOCAL, _SHAPE = map(attrgetter, ("grad", "_spec", "_local_tensor", "_local_tensor.shape"))
_REQUIRES_GRAD = attrgetter("requires_grad")
_HOOKS, _POST_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_NEVER_CALLED = """torch.autograd.graph.register_multi_grad_hook(mode='all') of sharded parameters would never be \
called: no node of the backward leads to them. Use mode='any', or register_post_accumulate_grad_hook of each."""

# The constructor, not from_local: no autograd, no checks, nothing but the wrapper. Its __init__ does nothing, slowly.
_wrap: Callable[[Tensor, Any], Tensor] = cast(Any, functools.partial(DTensor.__new__, DTensor, requires_grad=False))


class GradientSink:
    """Hands each parameter its slice of the flat's gradient, as autograd would have.

    A parameter that took no part in the backward keeps its `.grad` (None, usually); a first gradient becomes a view of
    the reduced buffer, without a copy; a later one is added. Tensor hooks and post-accumulate hooks of the parameter
    run, in that order. See [Note: hand-over].
    """

    def __init__(self, parameters: Sequence[nn.Parameter], plan: ShardPlan) -> None:
        self.parameters = list(parameters)
        self.plan = plan
        # With replicas: whether the all_reduce is still to come, and what then becomes of a gradient.
        self.defers_all_reduce: Callable[[], bool] = bool
        self.take_apart: Callable[[Tensor, list[int]], tuple[Tensor, list[int]] | None] = lambda grad, slots: (
            grad,
            slots,
        )
        self.hook: Callable[[Tensor], None] | None = None  # the user's, for what has been reduced
        # By backward: reentrant checkpointing runs backwards inside of a backward.
        self._expected: dict[int | None, set[int]] = {}
        self._separate: dict[int | None, Tensor] = {}
        self._late: dict[int | None, LateGradient] = {}  # by backward, until autograd comes to the flat
        self._specs: dict[int, tuple[Any, Any]] = {}  # id of a parameter's -> that, and the same in `grad_dtype`

    def expect(self, slots: Iterable[int]) -> None:
        """Say which parameters the running backward gives a gradient, before it arrives."""
        self._expected.setdefault(torch_private.backward_id(), set()).update(slots)

    def forget(self) -> None:
        """Drop what backwards that never ended (an exception) have announced; called when no backward runs."""
        self._expected.clear()
        self._separate.clear()
        self._late.clear()

    def keep(self, grad: Tensor) -> None:
        """Take a gradient that was reduced separately from that of the running backward, which arrives later."""
        backward = torch_private.backward_id()
        earlier = self._separate.get(backward)  # by another graph, of other parameters
        self._separate[backward] = grad if earlier is None else earlier + grad

    def can_be_late(self) -> bool:
        """Whether no hook sees the gradient of the running backward before that ends."""
        is_seen = self.hook is not None or self.defers_all_reduce() or torch_private.backward_id() in self._separate
        return not is_seen and not _have_hooks(self.parameters)

    def expect_late(self, gradient: LateGradient) -> None:
        """Let the running backward bring no gradient of the flat: `give` takes it later, if `take` is called before."""
        self._late[gradient.backward] = gradient

    def forget_late(self, backward: int | None) -> None:
        """Expect no late gradient any more."""
        self._late.pop(backward, None)

    def hand_over(self, flat: Tensor) -> None:
        """Post-accumulate-grad hook of the flat; leaves `flat.grad` None."""
        _hand_over_eagerly(self, flat)

    def take(self, flat: Tensor) -> None:
        """Give every expected parameter its slice of `flat.grad`."""
        grad, flat.grad = flat.grad, None
        backward = torch_private.backward_id()
        slots, separate = sorted(self._expected.pop(backward, ())), self._separate.pop(backward, None)
        if (late := self._late.pop(backward, None)) is not None:
            late.is_reached = True
            if grad is None:
                return
        if grad is None and not slots:
            if separate is not None:
                raise InvariantError("a gradient was reduced for a backward that brought none.")
            return  # torch calls the hook also for a backward without a gradient: its microbatch was accumulated
        if grad is None or not slots:
            names = ", ".join(slot.fqn for slot in self.plan.slots)
            raise InvariantError(f"a gradient arrived that no forward announced, for the shard of {names}.")
        if self.defers_all_reduce():
            if (taken := self.take_apart(grad if separate is None else separate + grad, slots)) is None:
                return  # reduced, and to be averaged over replicas in a later backward
            (grad, slots), separate = taken, None
        if separate is not None and _have_hooks([self.parameters[i] for i in slots]):
            grad, separate = separate + grad, None  # they see a backward's whole gradient, once
        for part in (grad,) if separate is None else (separate, grad):
            self.give(part, slots)

    def give(self, grad: Tensor, slots: Sequence[int]) -> None:
        """Add slices of a reduced gradient, `[shard_numel]`, to the `.grad` of the parameters in these slots."""
        slots = [i for i in slots if self.parameters[i].requires_grad]  # what was frozen since forward gets none
        parameters, grad = [self.parameters[i] for i in slots], grad.contiguous()
        if self.hook is not None:
            with torch.no_grad():
                self.hook(grad)
        specs = map(_SPEC, parameters)
        if self.plan.grad_dtype is not None:
            specs = map(self._in_grad_dtype, specs)
        grads = list(map(_wrap, self._slices(grad, slots, parameters), specs))
        (_give_one_by_one if _have_hooks(parameters) else _give_together)(parameters, grads)

    def _in_grad_dtype(self, spec: Any) -> Any:
        """The spec of a gradient whose dtype is not its parameter's: one object, which tells that both can be added."""
        if id(spec) not in self._specs:
            meta = spec.tensor_meta._replace(dtype=self.plan.grad_dtype)
            self._specs[id(spec)] = spec, dataclasses.replace(spec, tensor_meta=meta)
        return self._specs[id(spec)][1]

    def _slices(self, grad: Tensor, slots: Sequence[int], parameters: Sequence[nn.Parameter]) -> Iterable[Tensor]:
        start = cast(int, grad.storage_offset())
        offsets = [start + self.plan.slots[i].offset for i in slots]
        strides = map(torch.Tensor.stride, map(_LOCAL, parameters))  # of a view of the flat: contiguous
        return map(grad.as_strided, map(_SHAPE, parameters), strides, offsets)


# A whole train step may be compiled: then Dynamo is on during backward, and must leave our hooks alone.
_hand_over_eagerly = torch.compiler.disable(GradientSink.take)


def _have_hooks(parameters: Sequence[nn.Parameter]) -> bool:
    return any(map(_HOOKS, parameters)) or any(map(_POST_HOOKS, parameters))


def _give_together(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    present = list(map(_GRAD, parameters))
    if all(map(is_, present, repeat(None))):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
    elif _can_be_added_together(present, grads):
        with torch.no_grad():
            torch._foreach_add_(list(map(_LOCAL, present)), list(map(_LOCAL, grads)))
        # Only the local tensors were written; those who saved the DTensors must see that they have changed.
        torch.autograd.graph.increment_version(present)
    else:
        _give_one_by_one(parameters, grads)


def _can_be_added_together(present: Sequence[Any], grads: Sequence[Tensor]) -> bool:
    """Whether adding the local tensors is all there is to `old += grad`."""
    return (
        all(map(is_, map(type, present), repeat(DTensor)))
        and all(map(is_, map(_SPEC, present), map(_SPEC, grads)))
        and not any(map(_REQUIRES_GRAD, present))
    )


def _give_one_by_one(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    """Accumulate gradients as autograd does: tensor hooks, then the gradient, then post-accumulate hooks."""
    for parameter, grad in zip(parameters, grads, strict=True):
        for hook in (parameter._backward_hooks or {}).values():
            if getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.<locals>.get_inner_hook"):
                raise UnsupportedGraph(_NEVER_CALLED)
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad
        for post_hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            post_hook(parameter)
