"""`plan`: simulate training runs of a model at several world sizes and batch sizes, on one machine without GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxshard import hardware as hardwares
from fxshard.cost.optimizer_step import OptimizerBuilder
from fxshard.errors import ConfigError
from fxshard.hardware import HardwareSpec
from fxshard.inspect.tables import duration, size
from fxshard.inspect.target import Target, checked
from fxshard.plan.optimizers import adamw
from fxshard.plan.outline import outline
from fxshard.plan.run import PlannedFrame, PlannedSchedule, RunCost, cost_of

if TYPE_CHECKING:
    from rich.table import Table

WorldSize = int | tuple[int, int]
"""Ranks, or (replicas, shards)."""

FXSHARD = PlannedSchedule(options={"lower": "inductor", "schedule": "auto"})
FSDP2 = PlannedSchedule(options={"lower": "eager", "schedule": "fsdp2"}, fuses=False, is_fsdp2=True)
FSDP2_COMPILED = PlannedSchedule(options={"lower": "eager", "schedule": "fsdp2"}, is_fsdp2=True)
SCHEDULES = {"fxshard": FXSHARD, "FSDP2": FSDP2, "FSDP2 compiled": FSDP2_COMPILED}
"""Name -> schedule: ours, block by block; FSDP2 without a compiler, and around compiled blocks."""

COLUMNS = ("ranks", "batch", "schedule", "step", "tokens/s/GPU", "MFU", "exposed", "peak", "reserved", "fits")
"""The columns of the table."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One row of a plan."""

    world_size: WorldSize
    batch: int  # sequences of a rank and microbatch
    schedule: str  # a key of `SCHEDULES`
    cost: RunCost
    optimizer: str = ""  # a key of `PlanSettings.optimizers`; empty where these are one

    @property
    def name(self) -> str:
        """Ranks, batch and schedule."""
        return " ".join(self.cells[:3])

    @property
    def cells(self) -> tuple[str, ...]:
        """What the table says, one for each of `COLUMNS`."""
        cost, exposed = self.cost, sum(self.cost.exposed.values())
        return (
            ranks_text(self.world_size),
            str(self.batch),
            f"{self.schedule}, {self.optimizer}" if self.optimizer else self.schedule,
            duration(cost.seconds),
            f"{cost.tokens_per_second:,.0f}",
            f"{cost.mfu:.1%}",
            f"{exposed / cost.seconds:.1%}",
            size(cost.peak_bytes),
            size(cost.reserved),
            f"yes, {cost.limit} takes longest" if cost.fits else f"no, most is {cost.limit}",
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What training runs cost; `print` of rich shows a table."""

    model: str
    hardware: HardwareSpec
    runs: Sequence[PlannedRun]

    def __rich__(self) -> Table:
        """The table."""
        from rich.table import Table

        table = Table(title=f"{self.model} on {self.hardware.name}")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in ("schedule", "fits") else "right")
        for run in self.runs:
            table.add_row(*run.cells, style=None if run.cost.fits else "red")
        return table


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How a plan's runs train."""

    accumulation: int = 1  # microbatches of a step
    reduces_each: bool = True  # whether each of them reduces its gradients, or the last one for all
    param_dtype: torch.dtype = torch.bfloat16  # of gathered parameters and of compute
    reduce_dtype: torch.dtype = torch.float32  # of gradients while they are reduced
    schedules: Sequence[str] = ("fxshard", "FSDP2")  # keys of `SCHEDULES`
    # name -> what makes one or several of a sharded model, as the training script does; each has a run
    optimizers: Mapping[str, OptimizerBuilder] = field(default_factory=lambda: {"AdamW": adamw})

    @property
    def run(self) -> dict[str, Any]:
        """What `cost_of` takes of them."""
        return {"accumulation": self.accumulation, "reduces_each": self.reduces_each, "dtype": self.param_dtype}

    def options(self, hardware: HardwareSpec, schedule: PlannedSchedule) -> dict[str, Any]:
        """The backend's options to trace with."""
        dtypes = {"param_dtype": self.param_dtype, "reduce_dtype": self.reduce_dtype}
        return {**dtypes, "hardware": hardware.to_json(), **schedule.options}


def plan(
    build: Callable[[int], Any],
    *,
    world_sizes: Iterable[WorldSize],
    batches: Iterable[int],
    hardware: str = "h100-sxm",
    settings: PlanSettings | None = None,
    name: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Simulate a training step for each batch size, world size and schedule.

    The model is traced on fake tensors and sharded as `torch.compile(model, backend="fxshard")` would.

    Args:
        build: returns the model, unsharded, with the inputs of its forward for so many sequences, as
            `(model, args, kwargs)`; the forward returns the loss.
        world_sizes: of the runs.
        batches: sequences of a rank in a microbatch.
        hardware: a name, or the path of a JSON file: `hardware.py`.
        settings: how the runs train.
        name: what the table calls the model; default: its class.
        progress: called with a line before each simulation.

    Raises:
        ConfigError: an unknown hardware or schedule, or a model or mesh that cannot be planned.
        Exception: as `explain` raises.
    """
    spec, how, world_sizes = hardwares.load(hardware), settings or PlanSettings(), list(world_sizes)
    if unknown := [name for name in how.schedules if name not in SCHEDULES]:
        raise ConfigError(f"there is no schedule {', '.join(unknown)}; there are {', '.join(SCHEDULES)}.")
    for world_size in world_sizes:
        require_whole_nodes(world_size, spec)
    runs = []
    for batch in batches:
        target = checked(build(batch), "the builder")
        name = name or type(target[0]).__name__
        for world_size in world_sizes:
            for schedule in how.schedules:
                progress(f"{ranks_text(world_size)} ranks, batch {batch}, {schedule}")
                for optimizer, cost in _costs(target, world_size, spec, how, SCHEDULES[schedule]).items():
                    said = optimizer if len(how.optimizers) > 1 else ""
                    where: dict[str, Any] = {"world_size": world_size, "batch": batch, "schedule": schedule}
                    runs.append(PlannedRun(**where, optimizer=said, cost=cost))
    return Plan(model=name or "", hardware=spec, runs=tuple(runs))


def ranks_text(world_size: WorldSize) -> str:
    """As the command line has them: `8`, `4x8`."""
    return str(world_size) if isinstance(world_size, int) else "x".join(map(str, world_size))


def _costs(
    target: Target, world_size: WorldSize, spec: HardwareSpec, how: PlanSettings, schedule: PlannedSchedule
) -> dict[str, RunCost]:
    model, args, kwargs = target
    tokens, options = tokens_of((args, kwargs)), how.options(spec, schedule)
    given: dict[str, Any] = {"world_size": world_size, "options": options, "saves_all": not schedule.fuses}
    traced = outline(model, args, kwargs, **given, optimizers=how.optimizers)
    known: dict[int, PlannedFrame] = {}
    return {
        name: cost_of(traced, spec, schedule, tokens=tokens, known=known, optimizer=name, **how.run)
        for name in how.optimizers
    }


def tokens_of(inputs: Any) -> int:
    """Tokens of a microbatch: elements of the first input of whole numbers, else rows of the first input."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if not tensors:
        raise ConfigError("the model's inputs have no tensor; a plan counts tokens by the first one of whole numbers.")
    whole = [each for each in tensors if each.dim() and not (each.is_floating_point() or each.dtype == torch.bool)]
    return whole[0].numel() if whole else tensors[0].shape[0]


def require_whole_nodes(world_size: WorldSize, spec: HardwareSpec) -> None:
    """Refuse a mesh that does not fill its nodes evenly: links would be shared by groups of different sizes."""
    replicas, shards = world_size if isinstance(world_size, tuple) else (1, world_size)
    inside, ranks = spec.ranks_per_node, replicas * shards
    if inside and ranks > inside and (ranks % inside or max(shards, inside) % min(shards, inside)):
        raise ConfigError(
            f"{replicas} x {shards} ranks do not divide into nodes of {inside} ranks ({spec.name}). Shard over a "
            f"divisor or a multiple of {inside}, or set ranks_per_node in a hardware file."
        )
