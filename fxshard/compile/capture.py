"""From Dynamo's graph and the flats among its inputs to one value, with which the rest of the compilation begins."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributed.device_mesh import DeviceMesh

from fxshard import torch_private
from fxshard.compile import dynamo
from fxshard.compile.fsdp2_order import reduced_separately
from fxshard.errors import UnsupportedGraph
from fxshard.ir import meshes, ops
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.ops import MarkerKey
from fxshard.ir.plan import FramePlan, ParameterKey, UnitPlan
from fxshard.options import Options
from fxshard.runtime.flat_shard import Home
from fxshard.runtime.unit import Unit
from fxshard.sharding.sharded_module import ShardedModule

_log = logging.getLogger(__name__)

_READS = (torch.ops.fxshard.parameter, ops.PARAMETER)
_MAKES_PARAMETERS = (torch.ops.fxshard.whole, ops.WHOLE)

Reads = Mapping[fx.Node, ParameterKey]
"""Marker -> the parameter that it reads."""


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What is known of a graph that Dynamo captured.

    Attributes:
        plan: what the keys of its markers refer to.
        returned: index of a result -> the parameter that it is, or whose memory it shares.
        reduced_separately: as in `Frame`; only where sums are to equal FSDP2's to the bit.
    """

    plan: FramePlan
    returned: dict[int, ParameterKey]
    reduced_separately: Mapping[str, frozenset[SlotIndex]]


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any], flats: Mapping[int, Home], options: Options) -> Capture:
    """Bind the markers of a graph, in place, and refuse what the graph may not do. See [Note: markers].

    `example_inputs` are the real ones, or fake; `flats` come from `dynamo.flats_of`.
    """
    keys = _unit_keys([home.unit for home in flats.values()])
    reads = _bind_markers(gm, flats, keys)
    plan = _plan_of(gm, flats, keys)
    named = {node: plan.parameter_name(*key) for marker, key in reads.items() for node in _parameters_of(marker)}
    dynamo.refuse_writes(gm, example_inputs, named)
    dynamo.refuse_replaced_parameters()
    if not options.regional:  # else a unit is read in one call only
        _warn_of_parts(plan, reads)
    return Capture(
        plan=plan,
        returned=_returned(gm, reads),
        reduced_separately=reduced_separately(gm, plan, flats) if options.lower == "eager" else {},
    )


def _bind_markers(gm: fx.GraphModule, flats: Mapping[int, Home], keys: Mapping[int, str]) -> Reads:
    """Write the frame's own key into every marker, also in the subgraphs of higher-order ops."""
    reads: dict[fx.Node, ParameterKey] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    # A subgraph's input is the same fake tensor as the outer input that Dynamo lifted into it.
    homes = {id(placeholders[i].meta["example_value"]): home for i, home in flats.items()}
    calls: dict[tuple[str, str], int] = {}
    modules = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for marker in [node for module in modules for node in module.graph.nodes if node.target in _READS]:
        flat = marker.args[0]
        home = homes.get(id(flat.meta.get("example_value"))) if isinstance(flat, fx.Node) else None
        if home is None:
            raise UnsupportedGraph(
                f"%{marker.name} reads a parameter through {flat}, which is not an input of the captured graph. "
                "Read the parameter outside of the function that transforms it (vmap, cond, custom autograd)."
            )
        unit = keys[id(home.unit)]
        numbered = calls.setdefault((unit, _call(marker)), sum(u == unit for u, _ in calls))
        _, slot, *rest = ops.marker_arguments(str(marker.args[1]))
        _require_no_transform(marker, home.unit.plan.shards[home.shard].slots[slot].fqn)
        marker.target = ops.UNSHARD
        marker.args = (flat, str(MarkerKey(unit, home.shard, str(numbered))), slot, *rest)
        reads[marker] = unit, home.shard, slot
    for module in modules:
        module.recompile()
    return reads


def _require_no_transform(marker: fx.Node, fqn: str) -> None:
    if is_functorch_wrapped_tensor(marker.meta["example_value"]):
        raise UnsupportedGraph(
            f"{fqn} is read inside of a torch.func transform in compiled code. Transform the compiled model "
            "from outside: torch.func.grad(compiled), not torch.compile(torch.func.grad(model))."
        )


def _call(marker: fx.Node) -> str:
    """Return the innermost call of a sharded module that a read belongs to; Dynamo numbers a module's calls."""
    stack = marker.meta.get("nn_module_stack") or {}
    sharded = [key for key, (_, cls) in stack.items() if isinstance(cls, type) and issubclass(cls, ShardedModule)]
    return sharded[-1] if sharded else ""


def _plan_of(gm: fx.GraphModule, flats: Mapping[int, Home], keys: Mapping[int, str]) -> FramePlan:
    placeholders = gm.graph.find_nodes(op="placeholder")
    units = [home.unit for home in flats.values()]
    others = [(i, node) for i, node in enumerate(placeholders) if i not in flats]
    names = {i: dynamo.source_name(node).removeprefix("self.") for i, node in others}
    plan = FramePlan(
        units={keys[id(unit)]: _with_prefetch(unit, keys) for unit in units},
        shard_inputs={i: (keys[id(h.unit)], h.shard) for i, h in flats.items()},
        input_names=tuple(names.get(i, "") for i in range(len(placeholders))),
        metadata=frozenset(i for i, node in others if any(map(_is_reader, node.users))),
        is_part=any(id(unit) not in keys for each in units for unit in each.model.units),
        model_axes=meshes.axes_of([*meshes.meshes_in(gm.graph), *_meshes_of(units)]),
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


def _meshes_of(units: Iterable[Unit]) -> Iterator[DeviceMesh]:
    """Give the meshes that tensor-parallel parameters are on besides those of their units."""
    for member in (member for unit in units for member in unit.members):
        if member.tensor_parallel is not None:
            yield member.tensor_parallel.before.mesh


def _is_reader(node: fx.Node) -> bool:
    """Whether a node makes a parameter with hooks of gathered bytes; see [Note: extensions]."""
    return hasattr(node.target, "makes_parameter")


def _parameters_of(marker: fx.Node) -> list[fx.Node]:
    """Return the nodes that are the parameter to the user's code: the marker, or what makes the parameter of it."""
    return [n for n in marker.users if n.target in _MAKES_PARAMETERS or _is_reader(n)] or [marker]


def _returned(gm: fx.GraphModule, reads: Reads) -> dict[int, ParameterKey]:
    places = {
        torch_private.storage_id(node.meta["example_value"]): key
        for marker, key in reads.items()
        for node in _parameters_of(marker)
    }
    (results,) = gm.graph.output_node().args
    values = [result.meta.get("example_value") for result in results]  # type: ignore[union-attr]
    found = ((i, torch_private.storage_id(value)) for i, value in enumerate(values) if isinstance(value, Tensor))
    return {i: places[storage] for i, storage in found if storage in places}


def _warn_of_parts(plan: FramePlan, reads: Reads) -> None:
    """Warn of units of which the graph reads less than half and gathers all."""
    read = set(reads.values())
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
