"""What each block of a run may do with its parameters and activations, and what a step with a mix of policies costs.

The whole model is traced under the first policy, three blocks of each kind under each other one: to shard blocks and to
run them on fake tensors takes longer than to compile one. A mix is a step of graphs that would run, and `cost_of`
simulates it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxshard.compile.one_line.units import blocks_of
from fxshard.cost.optimizer_step import OptimizerBuilder
from fxshard.cost.solver import Picks
from fxshard.errors import ConfigError
from fxshard.hardware import HardwareSpec
from fxshard.inspect.explain import explained
from fxshard.inspect.target import Target
from fxshard.plan.outline import OutlinedModel, checkpointed, order_of, outline
from fxshard.plan.run import PlannedFrame, PlannedSchedule, RunCost, cost_of, planned_frames


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a unit does."""

    reshard_after_forward: bool | int = True  # as in `fully_shard`
    resident: bool = False  # whether parameters stay gathered from one microbatch to the next
    offloads: bool = False  # whether shards, gradients and optimizer state are on the host
    checkpoints: bool = False  # whether backward computes the block again

    @property
    def name(self) -> str:
        """In a few words."""
        if self.resident:
            words = "resident"
        elif self.offloads:
            words = "offload"
        elif isinstance(self.reshard_after_forward, bool):
            words = "reshard" if self.reshard_after_forward else "keep"
        else:
            words = f"reshard to {self.reshard_after_forward}"
        return f"{words}, checkpoint" if self.checkpoints else words

    @property
    def options(self) -> dict[str, Any]:
        """Of the backend, for a model all of whose units do this."""
        offload = {"offload": {"params": 1.0}} if self.offloads else {}
        return {"reshard_after_forward": self.reshard_after_forward, **offload}

    @property
    def fields(self) -> dict[str, Any]:
        """What it has other than `Policy()`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value != getattr(Policy, name)}


def read_policies(path: str | Path) -> dict[str, Policy]:
    """Read the policies of blocks: `{"layers.0": {"reshard_after_forward": false}}`, or raise a ConfigError."""
    try:
        return {name: Policy(**fields) for name, fields in json.loads(Path(path).read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no policies of blocks: {error}. fxshard plan --write makes one.") from error


KINDS = ("reshard", "keep", "subgroup", "resident", "offload", "checkpoint")
"""What policies may be made of."""


def policies_of(kinds: Iterable[str], *, shards: int, ranks_per_node: int, accumulation: int) -> list[Policy]:
    """The policies that make a difference in a run; the first one is FSDP's: gather again.

    Raise `ConfigError` for kinds that are not in `KINDS`.
    """
    kinds = set(kinds)
    if unknown := sorted(kinds.difference(KINDS)):
        raise ConfigError(f"there is no policy {', '.join(unknown)}; there are {', '.join(KINDS)}.")
    found = [Policy()]
    if "keep" in kinds:
        found.append(Policy(reshard_after_forward=False))
    if "subgroup" in kinds and 1 < ranks_per_node < shards:
        found.append(Policy(reshard_after_forward=ranks_per_node))
    if "resident" in kinds and accumulation > 1:
        found.append(Policy(reshard_after_forward=False, resident=True))
    if "offload" in kinds:
        found.append(Policy(offloads=True))
    if "checkpoint" in kinds:
        found += [dataclasses.replace(policy, checkpoints=True) for policy in found]
    return found


class TracedPolicies:
    """A model whose blocks are traced under every policy, to be simulated with a policy for each block."""

    def __init__(
        self,
        target: Target,
        policies: Sequence[Policy],
        hardware: HardwareSpec,
        schedule: PlannedSchedule,
        *,
        world_size: int | tuple[int, int],
        options: Mapping[str, Any],
        optimizers: Mapping[str, OptimizerBuilder] | None = None,
        **run: Any,
    ) -> None:
        """Trace; `options` are those of the backend, `run` what `cost_of` takes besides.

        Raise `ConfigError` if the model has no blocks, or as `outline` does.
        """
        model, args, kwargs = target
        self.policies, self.hardware, self.schedule, self.run = policies, hardware, schedule, run
        how: dict[str, Any] = {"world_size": world_size, "saves_all": not schedule.fuses}
        first = {**options, **policies[0].options}
        self.base = outline(model, args, kwargs, options=first, optimizers=optimizers, **how)
        if self.base.blocks is None:
            raise ConfigError(
                f"{type(model).__name__} has no blocks to choose policies for: put its layers into a ModuleList or a "
                "Sequential."
            )
        self.blocks, self.frames = self.base.blocks, [*self.base.blocks.frames]
        self.orders, resident = [self.base.order], set[int]()
        short, stand_ins = self.base.shortened()
        for policy in policies[1:]:
            what = checkpointed(short, blocks_of(short)) if policy.checkpoints else short
            given = {**options, **policy.options, "regional": True}
            blocks = explained(what, args, kwargs, options=given, **how)
            order = tuple(len(self.frames) + number for number in order_of(blocks, stand_ins))
            self.orders.append(order)
            self.frames += blocks.frames
            resident |= set(order) if policy.resident else set()
        self.resident = frozenset(resident)
        self._known: dict[int, PlannedFrame] = {}
        self._costs: dict[Picks, RunCost] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the blocks, in the order in which they are called."""
        return self.base.names

    def frames_of(self, picks: Picks) -> tuple[PlannedFrame, list[PlannedFrame]]:
        """The frame of what is around the blocks, and those of the blocks with a policy for each, by its number."""
        return planned_frames(self._mixed(picks, ()), self.hardware, self.schedule, self._known)

    def simulate(self, picks: Picks) -> RunCost:
        """What a step costs with a policy for each block."""
        if picks not in self._costs:
            _, called = self.frames_of(picks)
            offloaded = [frame for frame, pick in zip(called, picks, strict=True) if self.policies[pick].offloads]
            mixed = self._mixed(picks, offloaded)
            self._costs[picks] = cost_of(mixed, self.hardware, self.schedule, known=self._known, **self.run)
        return self._costs[picks]

    def _mixed(self, picks: Picks, offloaded: Sequence[PlannedFrame]) -> OutlinedModel:
        """The model with a policy for each block; the shards of these frames are on the host."""
        host, trained = (sum(getattr(f, name) for f in offloaded) for name in ("shard_bytes", "trained_bytes"))
        blocks = dataclasses.replace(
            self.blocks,
            frames=tuple(self.frames),
            device_bytes=self.blocks.device_bytes - host,
            host_bytes=host,
            trained_bytes=(self.blocks.trained_bytes[0] - trained, trained),
        )
        order = tuple(self.orders[pick][i] for i, pick in enumerate(picks))
        return dataclasses.replace(self.base, blocks=blocks, order=order, resident=self.resident)

    def all_alike(self) -> list[Picks]:
        """For each policy all blocks with it."""
        return [(number,) * len(self.names) for number in range(len(self.policies))]
