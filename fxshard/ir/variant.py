"""What one run of a captured graph does with gradients and parameters: the value by which its variants are told apart.

[Note: variants]
Whether a gradient is reduced is known when backward *runs*: `no_sync` may begin after the forward. So one captured
graph has several backwards, compiled when they are first needed:

    plain        reduces every unit
    accumulate   adds every gradient to its accumulator, and reduces nothing
    final        adds what was accumulated to the last gradient, and reduces the sum

All take what the forward saved, and after it the accumulators. Units of one graph that are set differently make further
ones. Each of them, and the forward as well, has one more with *resident* parameters: inputs that were gathered outside
of the graph, because they stay from one microbatch to the next. With replicas there is one that reduces and does not
average over them: [Note: replica sums] in `runtime/accumulation.py`.

An accumulator is the unit's own memory and never a result of a graph: two results may be the same tensor, and adding to
it in place would add twice. Source: fairscale `FlattenParamsWrapper`, which concatenates gradients in the last
microbatch alone; FSDP2 `set_requires_gradient_sync`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fxshard.ir import collectives
from fxshard.ir.collectives import SlotIndex, UnitSlot
from fxshard.ir.plan import FramePlan, ShardPlan, UnitPlan


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Which form of a captured graph is meant, by unit keys; see [Note: variants]."""

    accumulates: frozenset[str] = frozenset()  # gradients stay in their accumulators
    finishes: frozenset[str] = frozenset()  # accumulators are added to the gradients before these are reduced
    resident: frozenset[str] = frozenset()  # parameters come in gathered
    apart: frozenset[str] = frozenset()  # gradients are reduced, and averaged over replicas after the graph

    def name(self, units: Collection[str]) -> str:
        """Return what the history calls it; `units` are those with gradients in the graph."""
        words = ["resident"] if self.resident else []
        words += ["apart"] if self.apart else []
        if self.accumulates:
            words.insert(0, "accumulate" if self.accumulates == set(units) else "mixed")
        elif self.finishes:
            words.insert(0, "final")
        return "_".join(words) or "plain"

    @property
    def units(self) -> frozenset[str]:
        """The units whose accumulators it takes."""
        return self.accumulates | self.finishes

    def plan(self, plan: FramePlan) -> FramePlan:
        """Return the plan of its graphs."""
        units = {key: replace(unit, all_reduces=key not in self.apart) for key, unit in plan.units.items()}
        return replace(plan, units=units) if self.apart else plan


PLAIN = Variant()

Slots = Mapping[str, Sequence[SlotIndex]]
"""Unit key -> some of its parameters."""


def accumulator_dtype(unit: UnitPlan, shard: ShardPlan) -> torch.dtype:
    """Return the dtype in which the gradients of a shard are accumulated: the one in which they will be reduced."""
    (dtype,) = collectives.reduce_dtypes({(unit.shards.index(shard), 0): unit.unsharded_dtype(shard)}, unit)
    return dtype


def in_order(units: Collection[str], slots: Slots) -> list[UnitSlot]:
    """Return (unit, parameter) of each input that a variant takes for `units`, of those in `slots`, in their order."""
    return [(key, slot) for key in sorted(units) for slot in sorted(slots.get(key, ()))]
