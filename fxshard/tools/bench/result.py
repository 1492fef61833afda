"""What was measured, and what follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fxshard.tools.bench.comparison import loss_difference, median_ratio, options_in_json
from fxshard.tools.bench.config import REFERENCE, Entry
from fxshard.tools.bench.systems import LOCAL, WHOLE
from fxshard.tools.bench.traffic import Traffic
from fxshard.tools.bench.worker import Ready, Timed

FORMAT: Final = 1  # of the JSON; raised when a field changes its meaning
FLOORS: Final = ("local_compiled", "local")  # what a step costs without communication: the first that ran
PEERS: Final = ("fsdp2", "fsdp2_best")

_REFERENCE_TOLERANCE: Final = 1e-3  # relative, to training without any library
_SHARDED_TOLERANCE: Final = 1e-5  # relative, among those that communicate


@dataclass(kw_only=True)
class Steps:
    """Timed steps of one system in one place, in rounds in which all systems take theirs."""

    rounds: list[list[float]] = field(default_factory=list)  # seconds of each step
    peak_bytes: int | None = None  # the most that was allocated on the device in a step, where that was asked
    traffic: Traffic = field(default_factory=Traffic)  # of one step, all collectives together, likewise

    @property
    def all(self) -> list[float]:
        """Seconds of each step of all rounds."""
        return [seconds for steps in self.rounds for seconds in steps]

    @property
    def seconds(self) -> float:
        """Median step."""
        return statistics.median(self.all)

    def add(self, timed: Timed) -> None:
        """Take in a round."""
        self.rounds.append(timed.seconds)
        self.peak_bytes = max(filter(None, (self.peak_bytes, timed.peak_bytes)), default=None)
        self.traffic = timed.traffic

    def beside(self, base: Steps) -> Iterator[tuple[float, float]]:
        """The median step here and there of each round that both had."""
        for mine, theirs in zip(self.rounds, base.rounds, strict=False):
            yield statistics.median(mine), statistics.median(theirs)


@dataclass(kw_only=True)
class SystemResult:
    """What came of one system."""

    entry: Entry  # the system
    checkpointing: bool = False  # whether activations are computed again in backward, by the benchmark
    error: str | None = None  # first line of what ended it early
    log: str | None = None  # file that has the rest of it
    # for each process its timed steps, one in a round, the slowest rank's
    processes: list[Steps] = field(default_factory=list)
    # for each process what `Ready` says; the first starts with empty caches, the others do not
    ready_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of the first steps, mean over the ranks
    host_s: list[float] = field(default_factory=list)  # seconds that Python takes for a step, each measured
    traffic: dict[str, Traffic] = field(default_factory=dict)  # collectives of one step
    unsharded_peak_bytes: int | None = None  # of gathered parameters at once; `None` where unknown
    gathered_peak_bytes: int | None = None  # of what all_gathers brought, on an emulated link
    memory_peak_bytes: int | None = None  # of all tensors on the GPU of the rank that has most; `None` on a CPU

    @property
    def name(self) -> str:
        """As the user wrote it."""
        return self.entry.name

    @property
    def title(self) -> str:
        """Its name, and how it ran if there are two ways."""
        return f"{self.name}{' with checkpointing' if self.checkpointing else ''}"

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
        return [seconds for process in self.processes for seconds in process.all]

    def prepared(self, ready: Sequence[Ready]) -> None:
        """Take in what all ranks told when they were ready, which starts a process of the system."""
        self.processes.append(Steps())
        self.ready_s.append(max(rank.ready_s for rank in ready))
        self.losses = [statistics.fmean(losses) for losses in zip(*(rank.losses for rank in ready), strict=True)]
        self.traffic = ready[0].traffic
        self.unsharded_peak_bytes = ready[0].unsharded_peak_bytes
        self.gathered_peak_bytes = ready[0].gathered_peak_bytes
        self.memory_peak_bytes = max((rank.memory_peak_bytes for rank in ready if rank.memory_peak_bytes), default=None)

    def ratio(self, base: SystemResult) -> float | None:
        """Median over the rounds of this system's step over the base's in the same round."""
        processes = zip(self.processes, base.processes, strict=False)
        return median_ratio(pair for mine, theirs in processes for pair in mine.beside(theirs))


@dataclass(kw_only=True)
class Results:
    """The results of all systems; `options` and the order are the user's."""

    options: dict[str, Any]
    machine: dict[str, Any]
    systems: list[SystemResult] = field(default_factory=list)
    num_params: int = 0
    num_units: int = 0

    def failures(self) -> list[str]:
        """What failed."""
        return [f"{result.title} failed: {result.error}" for result in self.systems if result.error is not None]

    def disagreements(self, first: SystemResult, others: Iterable[SystemResult], tolerance: float) -> list[str]:
        """Whose losses differ from those of the first by more than is rounding."""
        differences = {result.title: loss_difference(result.losses, first.losses) for result in others}
        return [
            f"the losses of {title} and {first.name} differ by {difference:.1e} (relative)"
            for title, difference in differences.items()
            if not difference <= tolerance
        ]


@dataclass(kw_only=True)
class Report(Results):
    """The result of `fxshard bench`."""

    eps: float = 0.0  # of the parameters' dtype
    # losses of the first steps without any library; it has no times
    reference: SystemResult = field(default_factory=lambda: SystemResult(entry=Entry(name=REFERENCE, system=REFERENCE)))

    @property
    def bases(self) -> dict[str, SystemResult]:
        """What the others are compared with: the floor, and FSDP2 as it is and at its best, where they ran."""
        ran = {result.name: result for result in self.systems if result.steps}
        floors = [name for name in FLOORS if name in ran]
        return {name: ran[name] for name in (*floors[:1], *PEERS) if name in ran}

    def expected(self, result: SystemResult) -> SystemResult | None:
        """Whose losses a system must have: unsharded training's; on an emulated link the first sharded system's."""
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
        found = self.failures()
        for result in self.systems:
            difference, tolerance = self.difference(result), max(_REFERENCE_TOLERANCE, self.eps)
            if difference is not None and not difference <= tolerance:
                found.append(
                    f"{result.name} trains something else: its losses differ by {difference:.1e} (relative) from "
                    f"what they must be; at most {tolerance:g} is rounding"
                )
        sharded = [result for result in self.systems if result.losses and result.is_sharded]
        first, *others = sorted(sharded, key=lambda result: result.name != PEERS[0]) or [self.reference]
        tolerance = max(_SHARDED_TOLERANCE, self.eps)
        at_most = f"; at most {tolerance:g} is rounding"
        return [*found, *(line + at_most for line in self.disagreements(first, others, tolerance))]

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
                "by_process": [[1e3 * seconds for seconds in process.all] for process in result.processes],
            }
            if steps
            else None,
            "ratio_to": {name: result.ratio(base) for name, base in self.bases.items()} if steps else {},
            "first_step_s": result.ready_s,
            "losses": result.losses,
            "loss_difference": self.difference(result),
            "collectives": {
                name: {"launches": traffic.launches, "bytes": traffic.nbytes}
                for name, traffic in result.traffic.items()
            },
            "unsharded_peak_bytes": result.unsharded_peak_bytes,
            "gathered_peak_bytes": result.gathered_peak_bytes,
            "memory_peak_bytes": result.memory_peak_bytes,
        }
