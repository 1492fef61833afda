"""What one run of the benchmark is told to do."""

from __future__ import annotations

import ast
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fxshard import options
from fxshard.errors import ConfigError, nearest

GROUPS: Final = ("gloo", "emulated", "nccl")
FXSHARD: Final = "fxshard"  # the one system that takes options
REFERENCE: Final = "reference"  # runs by itself, before the others
ONE_GPU: Final = "one GPU, emulated link, identical peers"
DTYPES: Final[Mapping[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEFAULT_CTAS: Final = 16

SYSTEMS: Final[Mapping[str, str]] = {
    "local": "eager, no communication: every rank for itself",
    "local_compiled": "torch.compile, no communication: the floor",
    "ddp": "DistributedDataParallel",
    "fsdp2": "torch's fully_shard, eager",
    "fsdp2_compiled": "the same, every unit compiled by itself",
    "fsdp2_best": "the same with explicit forward prefetch, and on CPU with asynchronous gathers",
    "fsdp2_kept": "the same, parameters kept gathered between the microbatches of a step",
    "simplefsdp": "parameters as DTensors that a property gathers, compiled as a whole",
    "simplefsdp_bucketed": "the same, collectives merged by Inductor",
    "simplefsdp_overlapped": "the same, merged and moved by Inductor's overlap scheduling; needs triton",
    "fxshard_unordered": "fxshard with no collective moved and none pinned: Inductor's order",
    "fxshard_listed": "fxshard told for each unit which two to gather ahead, in forward and in backward",
    FXSHARD: 'torch.compile(backend="fxshard")',
}
_ON_DEMAND: Final = ("fsdp2_kept", "simplefsdp_overlapped", "fxshard_unordered", "fxshard_listed")
DEFAULT_SYSTEMS: Final = tuple(name for name in SYSTEMS if name not in _ON_DEMAND)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the table: a system with its options."""

    name: str  # as the user wrote it, such as "fxshard:bucket=auto"
    system: str  # key of `SYSTEMS`
    # for the compiler; the command line takes them for fxshard alone
    options: Mapping[str, Any] = field(default_factory=dict)
    # for the systems that shard parameters
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The options of `fxshard bench`; `fxshard bench --help` says what each does."""

    target: str
    entries: tuple[Entry, ...]
    out: Path  # Folder for logs and compiled code; it exists
    group: str = "gloo"
    ranks: int = 2  # Processes that train together, over all machines; 1 for the emulated link
    world_size: int = 2  # Ranks of the emulated link, or that share the parameters
    replicas: int = 1  # Machines of the emulated link, each of which holds all parameters; without tensor parallelism
    tensor_parallel: int = 1  # Ranks in a row of the emulated link that each layer is split over
    gigabytes_per_s: float = math.inf
    latency_us: float = 0.0
    between_gigabytes_per_s: float = math.inf
    between_latency_us: float = 0.0
    link_device: str = "cpu"  # "cpu" or "cuda": where the model is on an emulated link
    ctas: int = DEFAULT_CTAS
    machines: int = 1  # That the ranks are on
    dtype: str | None = None
    microbatches: int = 1
    rounds: int = 10
    warm: int = 0  # Steps of a system before each timed one
    processes: int = 1
    num_threads: int = 1  # Of each rank
    stall_s: float = 900.0  # Seconds without a message from any rank after which a system counts as failed
    check_steps: int = 3  # First steps, whose losses are compared
    lr: float = 1e-3  # Learning rate of AdamW

    @property
    def device(self) -> str:
        """Where the model is."""
        return {"gloo": "cpu", "nccl": "cuda"}.get(self.group, self.link_device)


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """What the ranks of a system do that was started `process` times before in this run."""

    config: BenchConfig
    entry: Entry
    process: int = 0

    @property
    def folder(self) -> Path:
        """Where the files of the system are."""
        names = [REFERENCE, *(entry.name for entry in self.config.entries)]
        return self.config.out / f"{names.index(self.entry.name)}-{self.entry.system}"

    @property
    def out(self) -> Path:
        """Folder of the ranks' logs."""
        return self.folder / f"process{self.process}"

    @property
    def cache(self) -> Path:
        """Inductor's cache: empty at the first start of a system, and no other system writes to it."""
        return self.folder / "cache"


def parse_entries(texts: Sequence[str], defaults: Sequence[str] = ()) -> tuple[Entry, ...]:
    """Turn "fxshard:bucket=auto" and the like into entries; `defaults` are options for all entries of fxshard."""
    shared = dict(_option(text) for text in defaults)
    if not texts:
        raise ConfigError(f"--systems names nothing to compare; systems: {', '.join(SYSTEMS)}.")
    entries = tuple(_entry(text, shared) for text in texts)
    if repeated := sorted({entry.name for entry in entries if texts.count(entry.name) > 1}):
        raise ConfigError(f"--systems names {', '.join(repeated)} more than once.")
    if shared and not any(entry.system == FXSHARD for entry in entries):
        raise ConfigError("--options are for fxshard, and --systems does not name it.")
    return entries


def _entry(text: str, shared: Mapping[str, Any]) -> Entry:
    system, *given = text.split(":")
    if system not in SYSTEMS:
        near = nearest(system, SYSTEMS)
        raise ConfigError(
            f"--systems: unknown system {system!r}. Did you mean {near!r}? Systems: {', '.join(SYSTEMS)}."
        )
    if system != FXSHARD:
        if given:
            raise ConfigError(f"--systems: {text!r} has options, which only {FXSHARD} takes.")
        return Entry(name=text, system=system)
    chosen = {**shared, **dict(_option(option) for option in given)}
    with contextlib.suppress(NotImplementedError):  # of a later release: the table says so, and the others run
        options.parse(chosen)
    return Entry(name=text, system=system, options=chosen)


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"an option of fxshard is written NAME=VALUE, such as lower=eager; got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
