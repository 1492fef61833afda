"""Reduced gradients that were on the link when their graph ended, and when they are waited for.

[Note: late gradients]
A block that is compiled by itself launches its reduction at the end of its backward graph. If the graph waited for it,
nothing would run beside it. So the graph returns the buffer as it is (`HandOffReductions`), autograd is given no
gradient for the flat, and the buffer is kept here. It is waited for, and becomes the `.grad` of the parameters,

- when a later graph of the same backward begins and more than `keep` reductions are late: what they send and bring
  takes memory, and the same number is allowed inside of a graph (`reduce_scatter_max_input_buffers`);
- at the end of the backward, before anything else that ends with it: waiting sums are reduced behind it.

Nothing is late where somebody looks at a gradient before: a hook of a parameter, the user's all_reduce hook, an
all_reduce over replicas that is still to come, or a part of the gradient that was reduced separately. The order of
additions to `.grad` is that of the graphs, as without.

A backward that fails leaves late gradients behind. The reductions are waited for (other ranks take part in them), and
what they brought is dropped at the next forward.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from fxshard import torch_private
from fxshard.ir import collectives
from fxshard.runtime import profiler_ranges
from fxshard.runtime.gradients import GradientSink


@dataclass(eq=False)
class LateGradient:
    """One reduced gradient of a shard that was left on the link.

    Attributes:
        unit: FQN of whose it is.
        grad: `[shard_numel]`, to be waited for.
        sink: that gives it to the parameters.
        slots: of the parameters that its graph trains.
        waiting: around the wait, so that ranks that wait for each other are named.
        is_wanted: whether autograd has come to the flat: not where `backward(inputs=...)` leaves parameters out.
    """

    unit: str
    grad: Tensor
    sink: GradientSink
    slots: Sequence[int]
    waiting: Callable[[], AbstractContextManager[None]]
    is_wanted: bool = False

    def wait(self) -> None:
        """Have what follows on the current stream (on the CPU: the caller) wait for it."""
        with self.waiting(), profiler_ranges.of_wait(self.unit):
            collectives.WAIT(self.grad)


class LateGradients:
    """Those of one model, oldest first; see [Note: late gradients]."""

    def __init__(self) -> None:
        """None is late."""
        self._late: deque[LateGradient] = deque()

    def defer(self, gradient: LateGradient) -> bool:
        """Keep a gradient for later; if somebody looks at it before, wait for it now and return `False`."""
        if not gradient.sink.can_be_late():
            gradient.wait()
            return False
        gradient.sink.expect_late(gradient)
        self._late.append(gradient)
        return True

    def arrive(self, keep: int = 0) -> None:
        """Wait for the oldest ones, all but `keep`, and give them to their parameters."""
        if len(self._late) > keep:
            _arrive_eagerly(self, keep)

    def wait_and_give(self, keep: int) -> None:
        """Do so."""
        while len(self._late) > keep:
            gradient = self._late.popleft()
            gradient.wait()
            if gradient.is_wanted:
                gradient.sink.give(gradient.grad, gradient.slots)

    def __del__(self) -> None:
        """Wait for what is left of a model that is gone, unseen by who traces meanwhile."""
        if self._late and not sys.is_finalizing():
            with torch_private.without_modes():
                self.drop()

    def drop(self) -> None:
        """Wait for what a backward that failed has left, and forget it."""
        while self._late:
            self._late.popleft().wait()


# A whole train step may be compiled: then Dynamo is on during backward, and must leave this alone.
_arrive_eagerly = torch.compiler.disable(LateGradients.wait_and_give)
