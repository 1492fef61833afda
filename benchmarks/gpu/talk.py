"""What the process that plans says to those that hold a system, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.settings import Link, Model
from fxshard.tools.bench.config import Entry
from fxshard.tools.bench.worker import Ready, Timed


@dataclass(kw_only=True)
class Job:
    """What one process does."""

    entry: Entry  # the system
    model: Model  # what it trains
    device: str  # "cuda" or "cpu"
    checkpointing: bool  # whether activations are computed again in backward
    world_size: int  # ranks that there seem to be
    folder: Path  # of the whole run

    @property
    def out(self) -> Path:
        """Folder of the log."""
        return self.folder / "logs" / f"{self.entry.name}{'-checkpointing' if self.checkpointing else ''}"


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Compile what steps of so many microbatches need; answered by `Ready`."""

    microbatches: int = 1  # of a step
    alone: bool = True  # whether no other process may run on the device meanwhile; see [Note: one at a time]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Take timed steps on a link, after two or more that are not timed; answered by `Timed`."""

    link: Link
    steps: int
    microbatches: int = 1
    warm_up: int = 2


@dataclass(frozen=True, kw_only=True)
class Host:
    """Measure how long Python takes for a step on the instant link; answered by `Timed`."""

    steps: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Profile some steps; answered by `Profiled`, or by `Refused`."""

    link: Link
    steps: int = 2


@dataclass(frozen=True, kw_only=True)
class Consolidate:
    """Bring the whole optimizer state to the CPU, so many times; answered by `Consolidated`, or by `Refused`."""

    repeats: int


@dataclass(frozen=True, kw_only=True)
class End:
    """There is nothing more to do; not answered."""


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A summary as `benchmarks.gpu.trace` makes it."""

    summary: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Consolidated:
    """Seconds of each call, and the bytes of what it returned."""

    seconds: list[float]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """It raised; the system itself is as it was."""

    error: str


Command = WarmUp | Turn | Host | Profile | Consolidate | End
Answer = Ready | Timed | Profiled | Consolidated | Refused
