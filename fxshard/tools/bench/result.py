"""What was measured, and what follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fxshard.tools.bench.comparison import loss_difference, median_ratio, options_in_json
from fxshard.tools.bench.config import REFERENCE, Entry
from fxshard.tools.bench.systems import LOCAL, WHOLE
from fxshard.tools.bench.traffic import Traffic
from fxshard.tools.bench.worker import Ready

FORMAT: Final = 1  # of the JSON; raised when a field changes its meaning
FLOORS: Final = ("local_compiled", "local")  # what a step costs without communication: the first that ran
PEERS: Final = ("fsdp2", "fsdp2_best")

_REFERENCE_TOLERANCE: Final = 1e-3  # relative, to training without any library
_SHARDED_TOLERANCE: Final = 1e-5  # relative, among those that communicate


@dataclass(kw_only=True)
class SystemResult:
    """What came of one system.

    Attributes:
        entry: the system.
        error: first line of what ended it early.
        log: file that has the rest of it.
        step_s: for each process its timed steps, the slowest rank's seconds.
        first_step_s: for each process its first step; the first starts with empty caches, the others do not.
        losses: of the first steps, mean over the ranks.
        traffic: collectives of one step.
        unsharded_peak_bytes: of gathered parameters at once; `None` where unknown.
        memory_peak_bytes: of all tensors on the GPU of the rank that has most; `None` on a CPU.
    """

    entry: Entry
    error: str | None = None
    log: str | None = None
    step_s: list[list[float]] = field(default_factory=list)
    first_step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    unsharded_peak_bytes: int | None = None
    memory_peak_bytes: int | None = None

    @property
    def name(self) -> str:
        """As the user wrote it."""
        return self.entry.name

    @property
    def is_local(self) -> bool:
        """Whether every rank trains for itself."""
        return self.entry.system in LOCAL

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds a part of the parameters only."""
        return self.entry.system not in WHOLE

    @property
    def steps(self) -> list[float]:
        """Seconds of the timed steps of all processes."""
        return [seconds for process in self.step_s for seconds in process]

    def prepared(self, ready: Sequence[Ready]) -> None:
        """Take in what all ranks told when they were ready, which starts a process of the system."""
        self.step_s.append([])
        self.first_step_s.append(max(rank.first_step_s for rank in ready))
        self.losses = [statistics.fmean(losses) for losses in zip(*(rank.losses for rank in ready), strict=True)]
        self.traffic = ready[0].traffic
        self.unsharded_peak_bytes = ready[0].unsharded_peak_bytes
        self.memory_peak_bytes = max((rank.memory_peak_bytes for rank in ready if rank.memory_peak_bytes), default=None)

    def ratio(self, base: SystemResult) -> float | None:
        """Median over the rounds of this system's step over the base's in the same round."""
        processes = zip(self.step_s, base.step_s, strict=False)
        return median_ratio(pair for ours, others in processes for pair in zip(ours, others, strict=False))


@dataclass(kw_only=True)
class Report:
    """The result of a run.

    Attributes:
        options: of the run, as the user gave them.
        machine: what it ran on.
        systems: in the order of the user.
        num_params: of the whole model.
        num_units: that the systems shard it into.
        eps: of the parameters' dtype.
        reference: losses of the first steps without any library; it has no times.
    """

    options: dict[str, Any]
    machine: dict[str, Any]
    systems: list[SystemResult]
    num_params: int = 0
    num_units: int = 0
    eps: float = 0.0
    reference: SystemResult = field(default_factory=lambda: SystemResult(entry=Entry(name=REFERENCE, system=REFERENCE)))

    @property
    def bases(self) -> dict[str, SystemResult]:
        """What the others are compared with: the floor, and FSDP2 as it is and at its best, where they ran."""
        ran = {result.name: result for result in self.systems if result.steps}
        floors = [name for name in FLOORS if name in ran]
        return {name: ran[name] for name in (*floors[:1], *PEERS) if name in ran}

    def expected(self, result: SystemResult) -> SystemResult | None:
        """Whose losses a system must have: training without any library, as far as they can be compared.

        On an emulated link the peers hold copies of this rank's shards, so that gathered parameters are not those of
        the model. Sharded systems are compared with the first of them there.
        """
        if self.options["group"] == "emulated" and result.is_sharded:
            return next((other for other in self.systems if other.is_sharded and other.losses), None)
        return self.reference

    def difference(self, result: SystemResult) -> float | None:
        """Largest relative difference of a system's losses to the expected ones; of a local one, the first alone."""
        expected = self.expected(result)
        if expected is None or not result.losses or not expected.losses:
            return None
        compared = 1 if result.is_local else len(expected.losses)
        return loss_difference(result.losses[:compared], expected.losses[:compared])

    def problems(self) -> list[str]:
        """What failed, and whose losses differ; empty when all is well."""
        found = [f"{result.name} failed: {result.error}" for result in self.systems if result.error is not None]
        for result in self.systems:
            difference, tolerance = self.difference(result), max(_REFERENCE_TOLERANCE, self.eps)
            if difference is not None and not difference <= tolerance:
                found.append(
                    f"{result.name} trains something else: its losses differ by {difference:.1e} (relative) from "
                    f"what they must be; at most {tolerance:g} is rounding"
                )
        return [*found, *self._disagreements()]

    def _disagreements(self) -> list[str]:
        sharded = [result for result in self.systems if result.losses and result.is_sharded]
        if not sharded:
            return []
        first, *others = sorted(sharded, key=lambda result: result.name != PEERS[0])
        tolerance = max(_SHARDED_TOLERANCE, self.eps)
        differences = {result.name: loss_difference(result.losses, first.losses) for result in others}
        return [
            f"the losses of {name} and {first.name} differ by {difference:.1e} (relative); at most {tolerance:g} is "
            "rounding"
            for name, difference in differences.items()
            if not difference <= tolerance
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON has it; seconds are in milliseconds where the name says so."""
        return {
            "format": FORMAT,
            "machine": self.machine,
            "options": self.options,
            "model": {"parameters": self.num_params, "units": self.num_units},
            "reference_losses": self.reference.losses,
            "systems": [self._system(result) for result in self.systems],
            "problems": self.problems(),
        }

    def _system(self, result: SystemResult) -> dict[str, Any]:
        steps = result.steps
        return {
            "name": result.name,
            "system": result.entry.system,
            "options": options_in_json(result.entry.options),
            "status": "ok" if result.error is None else "failed",
            "error": result.error,
            "log": result.log,
            "step_ms": {
                "median": 1e3 * statistics.median(steps),
                "min": 1e3 * min(steps),
                "max": 1e3 * max(steps),
                "by_process": [[1e3 * seconds for seconds in process] for process in result.step_s],
            }
            if steps
            else None,
            "ratio_to": {name: result.ratio(base) for name, base in self.bases.items()} if steps else {},
            "first_step_s": result.first_step_s,
            "losses": result.losses,
            "loss_difference": self.difference(result),
            "collectives": {
                name: {"launches": traffic.launches, "bytes": traffic.nbytes}
                for name, traffic in result.traffic.items()
            },
            "unsharded_peak_bytes": result.unsharded_peak_bytes,
            "memory_peak_bytes": result.memory_peak_bytes,
        }
