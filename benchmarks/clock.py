"""What the time of the pass manager goes to: its parts are wrapped from outside while a benchmark runs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import fx

from fxshard.ir import tags
from fxshard.ir.verify import baseline, verifier
from fxshard.passes import _manager
from fxshard.passes.pipeline import DEFAULT

APPLY, LINT, RECOMPILE, VERIFY, HISTORY, LOG, TAG, REST = PARTS = (
    "apply",
    "lint",
    "recompile",
    "verify",
    "history",
    "log and trace",
    "tag markers",
    "rest",
)


@dataclass(eq=False)
class Clock:
    """Seconds by part of the manager."""

    timer: Callable[[], float] = time.perf_counter  # wall clock, or `time.thread_time` where other processes are busy
    # part -> what it took by itself; the parts add up to the manager
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    num_nodes: int = 0  # of the graphs that the manager was given, added up
    _open: list[str] = field(default_factory=list)

    @property
    def total(self) -> float:
        """Seconds in `_manager.run`, and in the snapshot of Dynamo's graph."""
        return sum(self.seconds.values())

    @property
    def overhead(self) -> float:
        """Seconds of it that no pass worked."""
        return self.total - self.seconds[APPLY]

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count what `function` takes: inside the manager for `part`, the manager itself and the history anywhere."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not (self._open == [REST] or (not self._open and part in (REST, HISTORY))):
                return function(*args, **kwargs)  # part of another part, or not the manager's
            if part == REST:
                self.num_nodes += len(args[0].graph.nodes)
            outer = self._open[-1:]
            self._open.append(part)
            start = self.timer()
            try:
                return function(*args, **kwargs)
            finally:
                took = self.timer() - start
                self._open.pop()
                self.seconds[part] += took
                for name in outer:
                    self.seconds[name] -= took

        return timed


@contextmanager
def clocked(timer: Callable[[], float] = time.perf_counter) -> Iterator[Clock]:
    """Measure every run of the manager in this context."""
    clock = Clock(timer=timer)
    wrapped: list[tuple[Any, str, str]] = [
        (_manager, "run", REST),
        (_manager, "_publish", LOG),
        (baseline, "baseline_of", VERIFY),
        (verifier, "verify", VERIFY),
        (tags, "tag_markers", TAG),
        (_manager, "Snapshot", HISTORY),
        (fx.Graph, "lint", LINT),
        (fx.GraphModule, "recompile", RECOMPILE),
        *((kind, "apply", APPLY) for kind in {type(step) for step in (*DEFAULT.joint, *DEFAULT.split, *DEFAULT.last)}),
    ]
    with ExitStack() as stack:
        for owner, name, part in wrapped:
            stack.enter_context(patch.object(owner, name, clock.wrap(part, getattr(owner, name))))
        yield clock


def table(clock: Clock, whole: float) -> str:
    """The parts, and their share of `whole` seconds."""
    rows = [*clock.seconds.items(), ("manager and verifier", clock.overhead), ("with the passes", clock.total)]
    return "\n".join(f"{name:<22}{seconds:8.3f} s  {seconds / whole:7.2%}" for name, seconds in rows)
