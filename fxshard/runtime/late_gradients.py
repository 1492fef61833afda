"""Reduced gradients that were on the link when their graph ended, and when they are waited for.

[Note: late gradients]
A block that is compiled by itself launches its reduction at the end of its backward graph. If the graph waited for it,
nothing would run beside it. So the graph returns the buffer as it is (`HandOffReductions`), autograd is given no
gradient for the flat, and the buffer is kept here, as are gradients of parameters that code outside of graphs has read
(`eager.py`). It is waited for

- when a later graph or reduction of the same backward begins and those of more than `keep` units are in flight: what
  they send and bring takes memory, and the same number is allowed in a graph (`reduce_scatter_max_input_buffers`);
- when an optimizer steps in a hook of the backward;
- at the end of the backward, before anything else that ends with it: waiting sums are reduced behind it.

Autograd comes to a flat when all graphs that give it a gradient have run: a block may be called at several places. Only
then is it known that the gradient is whole, and wanted: `backward(inputs=...)` may leave it out. Its parts are added in
the order of their graphs, as autograd would, and go to the parameters at once.

Waited for at once: a unit whose parameters have hooks, or with an all_reduce hook, an all_reduce over replicas that is
still to come, or a part that was reduced separately. Other code that reads `.grad` in mid-backward may find None.

A backward that fails leaves late gradients behind. The reductions are waited for (other ranks take part in them), and
what they brought is dropped: at the next forward, or before anything is given. That a backward has failed shows in a
mark that only autograd holds, in the callback for the end of the backward: it is gone with the backward.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxshard import torch_private
from fxshard.runtime import profiler_ranges
from fxshard.runtime.gradients import GradientSink


@dataclass(eq=False)
class Reduction:
    """A reduction that is on the link."""

    unit: str  # FQN of the unit
    arrive: Callable[[], Tensor]  # waits for it, and returns what it brings, `[shard_numel]`
    # around the wait, so that ranks that wait for each other are named
    waiting: Callable[[], AbstractContextManager[None]]

    @functools.cached_property
    def grad(self) -> Tensor:
        """What it brings; what follows on the current stream (on the CPU: the caller) waits for it."""
        with self.waiting(), profiler_ranges.of_wait(self.unit):
            return self.arrive()


@dataclass(eq=False)
class LateGradient:
    """The gradient of a shard in one backward."""

    sink: GradientSink  # that gives it to the parameters
    backward: int | None  # identity of the backward
    mark: Callable[[], object | None]  # gives an object for as long as the backward runs
    parts: list[Reduction] = field(default_factory=list)  # one for each graph run that gives one
    slots: set[int] = field(default_factory=set)  # of the parameters that these graphs train
    in_flight: int = 0  # how many parts are to be waited for
    is_reached: bool = False  # whether autograd has come to the flat

    def sum(self) -> Tensor:
        """Return all parts together, in the dtype of the gradient: they may have been reduced in another one."""
        return functools.reduce(torch.add, [part.grad.to(self.sink.plan.gradient_dtype) for part in self.parts])


class BackwardMark:
    """Lives for as long as a backward runs."""


class LateGradients:
    """The late gradients of one model; see [Note: late gradients]."""

    def __init__(self) -> None:
        self._in_flight: list[tuple[Reduction, LateGradient]] = []  # oldest first
        self._late: dict[tuple[GradientSink, int | None], LateGradient] = {}
        self._marks: weakref.WeakValueDictionary[int | None, BackwardMark] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._in_flight)

    def begin(self, backward: int | None) -> BackwardMark:
        """Note that a backward begins; return its mark, for autograd to keep until the backward has ended or failed."""
        self._marks[backward] = mark = BackwardMark()
        return mark

    def defer(self, reduction: Reduction, sink: GradientSink, slots: Iterable[int]) -> Tensor | None:
        """Keep a part of a gradient for later; if a hook sees it before, wait for it now and return it.

        `slots` are those of the parameters that its graph trains.
        """
        if not sink.can_be_late():
            return reduction.grad.to(sink.plan.gradient_dtype)
        key = sink, torch_private.backward_id()
        if key not in self._late:
            mark = self._marks.get(key[1])
            self._late[key] = LateGradient(*key, weakref.ref(mark) if mark is not None else lambda: None)
            sink.expect_late(self._late[key])
        late = self._late[key]
        late.parts.append(reduction)
        late.slots.update(slots)
        late.in_flight += 1
        self._in_flight.append((reduction, late))
        return None

    def arrive(self, keep: int) -> None:
        """Wait for the oldest reductions, all but those of `keep` units, and give away the gradients that are whole."""
        if self._late:
            _arrive_eagerly(self, keep)

    def end(self, backward: int | None) -> None:
        """A backward ends: wait for everything, and drop what of it autograd has not come to."""
        if self._late:
            _arrive_eagerly(self, 0)
            for late in [late for late in self._late.values() if late.backward == backward]:
                self._forget(late)

    def wait_and_give(self, keep: int) -> None:
        """`arrive`, without Dynamo."""
        if any(late.mark() is None for late in self._late.values()):
            self.drop(lambda late: late.mark() is None)
        units = list(dict.fromkeys(reduction.unit for reduction, _ in self._in_flight))
        oldest = set(units[: max(0, len(units) - keep)])
        due = [pair for pair in self._in_flight if pair[0].unit in oldest]
        self._in_flight = [pair for pair in self._in_flight if pair[0].unit not in oldest]
        for reduction, late in due:
            _ = reduction.grad
            late.in_flight -= 1
        for late in [late for late in self._late.values() if late.is_reached and not late.in_flight]:
            self._forget(late)
            late.sink.give(late.sum(), sorted(late.slots))

    def _forget(self, late: LateGradient) -> None:
        del self._late[late.sink, late.backward]
        late.sink.forget_late(late.backward)

    def drop(self, which: Callable[[LateGradient], bool] = lambda late: True) -> None:
        """Wait for what a backward that failed has left, and forget it."""
        dropped = [pair for pair in self._in_flight if which(pair[1])]
        self._in_flight = [pair for pair in self._in_flight if not which(pair[1])]
        for reduction, _ in dropped:
            _ = reduction.grad
        for late in filter(which, list(self._late.values())):
            self._forget(late)

    def __del__(self) -> None:
        """Wait for what is left of a model that is gone, unseen by who traces meanwhile."""
        if self._in_flight and not sys.is_finalizing():
            with torch_private.without_modes():
                self.drop()


# A whole train step may be compiled: then Dynamo is on during backward, and must leave this alone.
_arrive_eagerly = torch.compiler.disable(LateGradients.wait_and_give)
