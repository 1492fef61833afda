"""What was measured, and what follows from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from fxshard.tools.bench.comparison import loss_difference, median_ratio
from tests.tools.bench.gpu.settings import COMPUTE, INSTANT, Link
from tests.tools.bench.gpu.talk import Carried, Timed

FORMAT: Final = 1  # of the JSON; raised when a field changes its meaning
HOW: Final = "one GPU, emulated link, identical peers"

_LOSSES_AGREE: Final = 0.02  # relative; bf16 has 8 bits


@dataclass(frozen=True, kw_only=True)
class Key:
    """Where a system was timed."""

    system: str
    checkpointing: bool
    link: Link = INSTANT
    microbatches: int = 1


@dataclass(kw_only=True)
class Steps:
    """Timed steps of one system in one place.

    Attributes:
        rounds: seconds of each step, by round.
        peak_bytes: the most that was allocated on the device in a step.
        carried: by the link in a step.
    """

    rounds: list[list[float]] = field(default_factory=list)
    peak_bytes: int | None = None
    carried: Carried = field(default_factory=Carried)

    @property
    def seconds(self) -> float:
        """Median step."""
        return statistics.median(step for steps in self.rounds for step in steps)

    def add(self, timed: Timed) -> None:
        """Take in a round."""
        self.rounds.append(timed.seconds)
        self.peak_bytes = max(filter(None, (self.peak_bytes, timed.peak_bytes)), default=None)
        self.carried = timed.carried


@dataclass(kw_only=True)
class Run:
    """What else came of a system, with or without activation checkpointing.

    Attributes:
        system: its name.
        checkpointing: which of the two.
        ready_s: seconds until it had compiled and taken its first steps; others compiled at the same time.
        losses: of these steps.
        host_s: seconds that Python takes for a step, each measured.
        error: first line of what ended it early.
    """

    system: str
    checkpointing: bool
    ready_s: float | None = None
    losses: tuple[float, ...] = ()
    host_s: list[float] = field(default_factory=list)
    error: str | None = None


@dataclass(kw_only=True)
class Report:
    """The result; it may be written at any time.

    Attributes:
        machine: what it ran on.
        options: of the run.
        tokens: per rank and microbatch.
        num_params: of the whole model.
        num_units: that it is sharded into.
        runs: of the systems.
        steps: timed ones.
        consolidation: system -> seconds of each call and bytes of the result.
        profiles: system -> summary of a trace.
        left_out: what there was no time for, and what was refused.
        seconds: that the run has taken so far.
    """

    machine: dict[str, Any]
    options: dict[str, Any]
    tokens: int
    num_params: int = 0
    num_units: int = 0
    runs: list[Run] = field(default_factory=list)
    steps: dict[Key, Steps] = field(default_factory=dict)
    consolidation: dict[str, dict[str, Any]] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def first(self, systems: Sequence[str], where: Key) -> Key | None:
        """The first of these systems that was timed in a place."""
        keys = (Key(**{**vars(where), "system": system}) for system in systems)
        return next((key for key in keys if key in self.steps), None)

    def seconds_of(self, key: Key | None) -> float | None:
        """Median step."""
        found = self.steps.get(key) if key is not None else None
        return found.seconds if found is not None else None

    def ratio(self, key: Key | None, base: Key | None) -> float | None:
        """Median over the rounds of one system's median step over the other's in the same round."""
        if key is None or base is None or key not in self.steps or base not in self.steps:
            return None
        rounds = zip(self.steps[key].rounds, self.steps[base].rounds, strict=False)
        return median_ratio((statistics.median(mine), statistics.median(theirs)) for mine, theirs in rounds)

    def tokens_per_s(self, key: Key) -> float | None:
        """Of one rank."""
        seconds = self.seconds_of(key)
        return None if seconds is None else self.tokens * key.microbatches / seconds

    def exposed_s(self, key: Key) -> float | None:
        """What the step is longer than the same code's on the instant link; a little below 0 is noise."""
        seconds, instant = self.seconds_of(key), self.seconds_of(_on(key, INSTANT))
        return None if seconds is None or instant is None else seconds - instant

    def compute_s(self, key: Key) -> float | None:
        """A step that sends nothing, of the whole model compiled."""
        return self.seconds_of(Key(system=COMPUTE, checkpointing=key.checkpointing, microbatches=key.microbatches))

    def host_s(self, system: str, checkpointing: bool = False) -> float | None:
        """Median of what Python takes for a step."""
        found = [run.host_s for run in self.runs if (run.system, run.checkpointing) == (system, checkpointing)]
        return statistics.median(found[0]) if found and found[0] else None

    def problems(self) -> list[str]:
        """What failed, and whose losses differ; empty when all is well."""
        found = [f"{_called(run)} failed: {run.error}" for run in self.runs if run.error is not None]
        for checkpointing in (False, True):
            sharded = [r for r in self.runs if r.checkpointing == checkpointing and r.system != COMPUTE and r.losses]
            for run in sharded[1:]:
                off = loss_difference(run.losses, sharded[0].losses)
                if not off <= _LOSSES_AGREE:
                    found.append(f"the losses of {_called(run)} and {sharded[0].system} differ by {off:.1e} (relative)")
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON has it; an instant link has no bandwidth."""
        return {
            "format": FORMAT,
            "how": HOW,
            "machine": self.machine,
            "options": self.options,
            "model": {"parameters": self.num_params, "units": self.num_units, "tokens": self.tokens},
            "systems": [{**asdict(run), "losses": [_finite(loss) for loss in run.losses]} for run in self.runs],
            "steps": [self._steps(key, steps) for key, steps in self.steps.items()],
            "consolidation": self.consolidation,
            "profiles": self.profiles,
            "left_out": self.left_out,
            "problems": self.problems(),
            "seconds": round(self.seconds, 1),
        }

    def _steps(self, key: Key, steps: Steps) -> dict[str, Any]:
        speed = key.link.gigabytes_per_s
        link = {**asdict(key.link), "gigabytes_per_s": speed if math.isfinite(speed) else None}
        exposed = self.exposed_s(key)
        return {
            "system": key.system,
            "checkpointing": key.checkpointing,
            "microbatches": key.microbatches,
            "link": link,
            "step_ms": 1e3 * steps.seconds,
            "rounds_ms": [[round(1e3 * step, 4) for step in steps] for steps in steps.rounds],
            "tokens_per_s": self.tokens_per_s(key),
            "exposed_ms": None if exposed is None else 1e3 * exposed,
            "peak_bytes": steps.peak_bytes,
            "collectives": asdict(steps.carried),
        }


def _finite(value: float) -> float | None:
    """As JSON has it."""
    return value if math.isfinite(value) else None


def _on(key: Key, link: Link) -> Key:
    return Key(**{**vars(key), "link": link})


def _called(run: Run) -> str:
    return f"{run.system}{' with checkpointing' if run.checkpointing else ''}"
