"""What came of the demo so far, gathered from the events of all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fxshard.tools.demo.config import MAX_DIFFERENCE, DemoConfig
from fxshard.tools.demo.events import Event, Graph, Run, Started, Step, UnitLaunches

_RECENT_STEPS = 5


@dataclass
class Outcome:
    """Losses, times, bytes, graphs and units so far; `state_bytes` is the most that a sharded rank stores."""

    config: DemoConfig
    graphs: list[Graph] = field(default_factory=list)
    units: list[UnitLaunches] = field(default_factory=list)
    num_params: int = 0
    full_bytes: int = 0
    state_bytes: int = 0
    _steps: dict[tuple[Run, int], list[Step]] = field(default_factory=lambda: defaultdict(list))

    def add(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case Started():
                self.num_params, self.full_bytes = event.num_params, event.full_bytes
            case Step():
                self._steps[event.run, event.step].append(event)
                if event.run is Run.SHARDED:
                    self.state_bytes = max(self.state_bytes, event.state_bytes)
            case Graph():
                self.graphs.append(event)
            case UnitLaunches():
                self.units.append(event)

    def losses(self, run: Run) -> list[float]:
        """The loss of each step that all ranks have taken: the mean over ranks, hence over the global batch."""
        return [sum(step.loss for step in steps) / len(steps) for steps in self._taken(run)]

    def tokens_per_s(self, run: Run) -> float | None:
        """Tokens per second over the last steps, the first (which compiles) left out; None before there are any."""
        recent = self._taken(run)[1:][-_RECENT_STEPS:]
        seconds = sum(max(step.seconds for step in steps) for steps in recent)
        return self.config.tokens_per_step * len(recent) / seconds if recent else None

    def first_step_s(self, run: Run) -> float | None:
        """Seconds of the first step, compile included; None before it is over."""
        taken = self._taken(run)
        return max(step.seconds for step in taken[0]) if taken else None

    def largest_difference(self) -> float | None:
        """The largest difference between a sharded and an unsharded loss; None without comparison."""
        pairs = zip(self.losses(Run.SHARDED), self.losses(Run.UNSHARDED), strict=False)
        differences = [abs(sharded - unsharded) for sharded, unsharded in pairs]
        if any(math.isnan(difference) for difference in differences):
            return math.nan
        return max(differences, default=None)

    def problems(self) -> Sequence[str]:
        """What is wrong with a demo that has ended; empty when all is well."""
        found = []
        losses = self.losses(Run.SHARDED)
        if not losses[-1] < losses[0]:
            found.append(f"the loss did not fall: {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
        difference = self.largest_difference()
        if difference is not None and not difference <= MAX_DIFFERENCE:
            found.append(f"sharded and unsharded losses differ by {difference:.2e}, more than {MAX_DIFFERENCE:.0e}")
        return found

    def _taken(self, run: Run) -> list[list[Step]]:
        num_ranks = self.config.ranks if run is Run.SHARDED else 1
        steps = (self._steps.get((run, step), []) for step in range(self.config.steps))
        return [of_step for of_step in steps if len(of_step) == num_ranks]
