"""Several microbatches per step, and parameters that stay gathered between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

import fxshard
from fxshard.runtime import unsharded_cache
from fxshard.sharding.sharded_module import ShardedModule, units_under
from tests.numerics.harness import Run

Backward = Callable[[Run, int], Tensor]

NUM_MICROBATCHES = 3


def set_sync(model: nn.Module, sync: bool) -> None:
    """Switch gradient sync, where the system has any."""
    if hasattr(model, "set_requires_gradient_sync"):
        cast(ShardedModule, model).set_requires_gradient_sync(sync)


def loss_of(run: Run, step: int, microbatch: int) -> Tensor:
    return run.loss(10 * step + microbatch) / NUM_MICROBATCHES


def total(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack([loss.detach() for loss in losses]).sum()


def in_turn(run: Run, step: int, *flags: Mapping[str, bool], loss: Callable[[int], Tensor] | None = None) -> Tensor:
    """Run forward and backward of a microbatch for each of `flags`, which are set first where the system has them."""
    losses = []
    for i, given in enumerate(flags):
        for name, value in given.items():
            if hasattr(run.model, f"set_{name}"):
                getattr(run.model, f"set_{name}")(value)
        losses.append(loss_of(run, step, i) if loss is None else loss(i))
        losses[-1].backward()
    return total(losses)


def several(run: Run, step: int) -> Tensor:
    """Three microbatches, the last with gradient sync."""
    return in_turn(run, step, *({"requires_gradient_sync": i == NUM_MICROBATCHES - 1} for i in range(NUM_MICROBATCHES)))


def with_no_sync(run: Run, step: int) -> Tensor:
    """Three microbatches, the first two in nested `no_sync`; everywhere else as `several`."""
    if not run.system.ours:
        return several(run, step)
    losses = []
    with fxshard.no_sync(run.model):
        with fxshard.no_sync(run.model):
            losses.append(loss_of(run, step, 0))
            losses[-1].backward()
        losses.append(loss_of(run, step, 1))
        losses[-1].backward()
    losses.append(loss_of(run, step, 2))
    losses[-1].backward()
    return total(losses)


def forwards_ahead(run: Run, step: int) -> Tensor:
    """F F B F B B, as a stage of a pipeline runs them: the flag is read when a backward runs."""
    first, second = loss_of(run, step, 0), loss_of(run, step, 1)
    set_sync(run.model, False)
    first.backward()
    third = loss_of(run, step, 2)
    second.backward()
    set_sync(run.model, True)
    third.backward()
    return (first + second + third).detach()


def now_and_then(run: Run, step: int) -> Tensor:
    """Accumulate in every second step only; elsewhere reduce every microbatch."""
    set_sync(run.model, True)
    if step % 2:
        return several(run, step)
    losses = [loss_of(run, step, i) for i in range(NUM_MICROBATCHES)]
    for loss in losses:
        loss.backward()
    return total(losses)


def set_kept(model: nn.Module, kept: bool) -> None:
    """Keep parameters unsharded after backward, where the system can."""
    if hasattr(model, "set_reshard_after_backward"):
        cast(ShardedModule, model).set_reshard_after_backward(not kept)


def kept(run: Run, step: int) -> Tensor:
    """Three microbatches, the last with gradient sync; parameters stay unsharded until then."""
    ends = [i == NUM_MICROBATCHES - 1 for i in range(NUM_MICROBATCHES)]
    return in_turn(run, step, *({"requires_gradient_sync": end, "reshard_after_backward": end} for end in ends))


def holds(run: Run) -> bool:
    return holds_any(cast(Any, run.model)._orig_mod)


def holds_any(model: nn.Module) -> bool:
    return any(unsharded_cache.is_resident(unit) for unit in units_under(model))
