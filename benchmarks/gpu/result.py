"""What was measured, and what follows from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from benchmarks.gpu.settings import COMPUTE, INSTANT, Link
from fxshard.tools.bench.comparison import median_ratio
from fxshard.tools.bench.config import ONE_GPU
from fxshard.tools.bench.result import Results, Steps, SystemResult

FORMAT: Final = 1  # of the JSON; raised when a field changes its meaning

_LOSSES_AGREE: Final = 0.02  # relative; bf16 has 8 bits


@dataclass(frozen=True, kw_only=True)
class Key:
    """Where a system was timed."""

    system: str
    checkpointing: bool
    link: Link = INSTANT
    microbatches: int = 1


@dataclass(kw_only=True)
class GpuReport(Results):
    """The result; it may be written at any time."""

    tokens: int  # per rank and microbatch
    steps: dict[Key, Steps] = field(default_factory=dict)  # timed ones
    # system -> seconds of each call and bytes of the result
    consolidation: dict[str, dict[str, Any]] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)  # system -> summary of a trace
    left_out: list[str] = field(default_factory=list)  # what there was no time for, and what was refused
    seconds: float = 0.0  # that the run has taken so far

    def first(self, systems: Sequence[str], where: Key) -> Key | None:
        """The first of these systems that was timed in a place."""
        keys = (replace(where, system=system) for system in systems)
        return next((key for key in keys if key in self.steps), None)

    def seconds_of(self, key: Key | None) -> float | None:
        """Median step."""
        found = self.steps.get(key) if key is not None else None
        return found.seconds if found is not None else None

    def ratio(self, key: Key | None, base: Key | None) -> float | None:
        """Median over the rounds of one system's median step over the other's in the same round."""
        if key is None or base is None or key not in self.steps or base not in self.steps:
            return None
        return median_ratio(self.steps[key].beside(self.steps[base]))

    def tokens_per_s(self, key: Key) -> float | None:
        """Of one rank."""
        seconds = self.seconds_of(key)
        return None if seconds is None else self.tokens * key.microbatches / seconds

    def exposed_s(self, key: Key) -> float | None:
        """What the step is longer than the same code's on the instant link; a little below 0 is noise."""
        seconds, instant = self.seconds_of(key), self.seconds_of(replace(key, link=INSTANT))
        return None if seconds is None or instant is None else seconds - instant

    def compute_s(self, key: Key) -> float | None:
        """A step that sends nothing, of the whole model compiled."""
        return self.seconds_of(Key(system=COMPUTE, checkpointing=key.checkpointing, microbatches=key.microbatches))

    def host_s(self, system: str, checkpointing: bool = False) -> float | None:
        """Median of what Python takes for a step."""
        found = [run.host_s for run in self.systems if (run.name, run.checkpointing) == (system, checkpointing)]
        return statistics.median(found[0]) if found and found[0] else None

    def problems(self) -> list[str]:
        """What failed, and whose losses differ; empty when all is well."""
        found = self.failures()
        for checkpointing in (False, True):
            sharded = [r for r in self.systems if r.checkpointing == checkpointing and r.name != COMPUTE and r.losses]
            found += self.disagreements(sharded[0], sharded[1:], _LOSSES_AGREE) if sharded else []
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON has it; an instant link has no bandwidth."""
        return {
            "format": FORMAT,
            "how": ONE_GPU,
            "machine": self.machine,
            "options": self.options,
            "model": {"parameters": self.num_params, "units": self.num_units, "tokens": self.tokens},
            "systems": [self._system(result) for result in self.systems],
            "steps": [self._steps(key, steps) for key, steps in self.steps.items()],
            "consolidation": self.consolidation,
            "profiles": self.profiles,
            "left_out": self.left_out,
            "problems": self.problems(),
            "seconds": round(self.seconds, 1),
        }

    def _system(self, result: SystemResult) -> dict[str, Any]:
        return {
            "system": result.name,
            "checkpointing": result.checkpointing,
            "ready_s": next(iter(result.ready_s), None),
            "losses": [_finite(loss) for loss in result.losses],
            "host_s": result.host_s,
            "error": result.error,
        }

    def _steps(self, key: Key, steps: Steps) -> dict[str, Any]:
        link = {**asdict(key.link), "gigabytes_per_s": _finite(key.link.gigabytes_per_s)}
        exposed, sent = self.exposed_s(key), asdict(steps.traffic)
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
            "collectives": {{"nbytes": "bytes"}.get(name, name): value for name, value in sent.items()},
        }


def _finite(value: float) -> float | None:
    """As JSON has it."""
    return value if math.isfinite(value) else None
