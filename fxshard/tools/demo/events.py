"""What the ranks tell the process that started them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Run(Enum):
    """Which training an event belongs to."""

    SHARDED = "sharded"
    UNSHARDED = "unsharded"


@dataclass(frozen=True, kw_only=True)
class Started:
    """A training is about to take its first step, which compiles."""

    run: Run
    num_params: int
    full_bytes: int  # Of parameters, gradients and AdamW moments that one rank holds when nothing is sharded


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rank has taken an optimizer step."""

    run: Run
    rank: int
    step: int  # Which one, from 0
    loss: float  # Mean over this rank's rows of the batch
    seconds: float  # How long it took, the compile of the first step included
    state_bytes: int  # Storage of parameters, gradients and AdamW state on this rank


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A compiled graph was written to `path`, as it is after all passes; its launches are counted by name."""

    kind: str
    path: str
    collectives: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class UnitLaunches:
    """Parameters that are gathered and reduced together."""

    name: str  # FQN of its module
    num_params: int  # Of all ranks together
    launches: dict[str, dict[str, int]]  # Kind of graph -> the collectives that it launches for the unit in one call


Event = Started | Step | Graph | UnitLaunches
