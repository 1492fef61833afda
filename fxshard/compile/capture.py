"""From Dynamo's graph and the flats among its inputs to one value, with which the rest of the compilation begins."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx
from torch._C._functorch import is_functorch_wrapped_tensor

from fxshard import torch_private
from fxshard.compile import dynamo
from fxshard.compile.fsdp2_order import reduced_separately
from fxshard.errors import UnsupportedGraph
from fxshard.ir import meshes, reads
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.plan import FramePlan, ParameterKey, UnitPlan
from fxshard.options import Options
from fxshard.runtime import eager
from fxshard.runtime.flat_shard import Home
from fxshard.runtime.unit import Unit

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What is known of a graph that Dynamo captured; the fields are those of `Frame`."""

    plan: FramePlan
    returned: dict[int, ParameterKey]
    reduced_separately: Mapping[str, frozenset[SlotIndex]]  # only where sums are to equal FSDP2's to the bit


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any], flats: Mapping[int, Home], options: Options) -> Capture:
    """Find out what a graph reads and returns; `example_inputs` are the real ones, or fake."""
    plan = _plan_of(gm, example_inputs, flats)
    found = reads.reads_of(gm, plan)
    for marker, key in found.items():
        if is_functorch_wrapped_tensor(marker.meta["example_value"]):
            raise UnsupportedGraph(
                f"{plan.parameter_name(*key)} is read inside of a torch.func transform in compiled code. Transform the "
                "compiled model from outside: torch.func.grad(compiled), not torch.compile(torch.func.grad(model))."
            )
    dynamo.refuse_replaced_parameters()
    if options.regional is not True:  # else a unit is read in one call only
        _warn_of_parts(plan, found)
    return Capture(
        plan=plan,
        returned=_returned(gm, found),
        reduced_separately=reduced_separately(gm, found, flats, plan) if options.lower == "eager" else {},
    )


def _plan_of(gm: fx.GraphModule, example_inputs: Sequence[Any], flats: Mapping[int, Home]) -> FramePlan:
    placeholders = gm.graph.find_nodes(op="placeholder")
    units = [home.unit for home in flats.values()]
    keys = _unit_keys(units)
    others = [(i, node) for i, node in enumerate(placeholders) if i not in flats]
    names = {i: dynamo.source_name(node).removeprefix("self.") for i, node in others}
    split = [m.tensor_parallel.before.mesh for unit in units for m in unit.members if m.tensor_parallel]
    plan = FramePlan(
        units={keys[id(unit)]: _with_prefetch(unit, keys) for unit in units},
        shard_inputs={i: (keys[id(h.unit)], h.shard) for i, h in flats.items()},
        input_names=tuple(names.get(i, "") for i in range(len(placeholders))),
        metadata=frozenset(i for i, node in others if any(map(reads.makes_parameter, node.users))),
        lent=eager.returned_names(example_inputs),
        is_part=any(id(unit) not in keys for each in units for unit in each.model.units),
        unset=frozenset(keys[id(unit)] for unit in units if unit.settings.reshard_after_forward is None),
        model_axes=meshes.axes_of([*filter(None, map(meshes.mesh_of, placeholders)), *split]),
    )
    return plan.with_subgroups()


def _unit_keys(units: Sequence[Unit]) -> dict[int, str]:
    """Map unit id -> its FQN, made unique within the graph (two models may use the same names)."""
    keys: dict[int, str] = {}
    for unit in units:
        if id(unit) not in keys:
            key = unit.fqn
            while key in keys.values():
                key += "'"
            keys[id(unit)] = key
    return keys


def _with_prefetch(unit: Unit, keys: Mapping[int, str]) -> UnitPlan:
    """Return the unit's plan with its prefetch lists, as far as this graph has what is in them."""

    def here(listed: tuple[Unit, ...] | None) -> tuple[str, ...] | None:
        found = tuple(keys[id(other)] for other in listed or () if id(other) in keys)
        return found or (() if listed == () else None)

    lists = unit.settings
    return replace(
        unit.plan, forward_prefetch=here(lists.forward_prefetch), backward_prefetch=here(lists.backward_prefetch)
    )


def _returned(gm: fx.GraphModule, found: Mapping[fx.Node, ParameterKey]) -> dict[int, ParameterKey]:
    parameters = [(node, key) for marker, key in found.items() for node in reads.parameters_of(marker)]
    places = {torch_private.storage_id(node.meta["example_value"]): key for node, key in parameters}
    (results,) = gm.graph.output_node().args
    values = [result.meta.get("example_value") for result in results]  # type: ignore[union-attr]
    stored = ((i, torch_private.storage_id(value)) for i, value in enumerate(values) if isinstance(value, Tensor))
    return {i: places[storage] for i, storage in stored if storage in places}


def _warn_of_parts(plan: FramePlan, found: Mapping[fx.Node, ParameterKey]) -> None:
    read = set(found.values())
    for key, unit in plan.units.items():
        sizes = {(key, i, j): slot.numel for i, shard in enumerate(unit.shards) for j, slot in enumerate(shard.slots)}
        share = sum(sizes[slot] for slot in sizes.keys() & read) / max(1, sum(sizes.values()))
        if share < 0.5 and unit.world_size > 1 and key not in plan.in_subgroups:
            _log.warning(
                "fxshard: a captured graph reads %.0f%% of unit %r but gathers all of it. Where a graph break splits "
                "the unit, remove the break (TORCH_LOGS=graph_breaks) or give the parts a fully_shard each.",
                100 * share,
                key or "root",
            )
