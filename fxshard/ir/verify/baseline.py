"""What a graph must keep while passes rewrite it, and the graph that is compared with it."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxshard.ir import collectives, dataflow, launches, ops, regions, signature, tags, text
from fxshard.ir.dataflow import Dataflow, Value
from fxshard.ir.plan import FramePlan, ParameterKey, ShardPlan, Slot, UnitPlan, qualified
from fxshard.ir.properties import GraphKind, Property
from fxshard.ir.tags import ShardKey
from fxshard.ir.verify.slot_layout import ShardGradient, gradient_of_shard

ReadName = tuple[str, str | None]
"""What a node reads: a parameter and in which call of its unit (`None`: not known), or another node by its name."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What must stay true of a graph while passes rewrite it."""

    plan: FramePlan
    kind: GraphKind
    inputs: tuple[str, ...]  # name and type of each
    outputs: tuple[str, ...]  # type of each, "None" where there is none
    promised: dict[ParameterKey, int]  # how many gradients the markers add up; empty without markers
    gradients: dict[int, ShardKey]  # output index -> the shard whose gradient it is
    had_launches: bool  # of ours, at the start: then more is reduced than was promised
    sequence: tuple[str, ...]  # the launches of every group, in order
    payloads: tuple[tuple[str, ...], ...]  # what each launch of ours sends, in words; see `payload_of`
    reads: dict[str, tuple[object, tuple[ReadName, ...]]]  # node name -> its target and what it reads
    calls: dict[str, str]  # name of a region's call -> which code it calls
    results: dict[str, tuple[str, object]]  # name of a result of such a call -> the call, and which result
    slots: dict[str, ParameterKey]  # name of a `reduce_grad` marker -> whose gradient it reduces
    num_results: int | None  # of a forward graph; its other outputs are saved for backward
    unsharded_budget_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A graph that is being verified."""

    graph: fx.Graph
    baseline: Baseline
    properties: Collection[Property]

    @functools.cached_property
    def flow(self) -> Dataflow:
        """What its values are; see [Note: flow]."""
        return dataflow.dataflow_of(self.graph, self.baseline.plan)

    @functools.cached_property
    def launches(self) -> list[fx.Node]:
        """The launches that passes inserted; a model may launch collectives of its own."""
        return [n for n in self.graph.nodes if n.target in collectives.LAUNCHES and self.is_ours(n)]

    def is_ours(self, launch: fx.Node) -> bool:
        """Return whether a launch is tagged with a unit or sends something that belongs to one."""
        if tags.meta_of(launch).calls:
            return True
        if launch.target in collectives.ALL_REDUCES or not self.baseline.plan.has_group(collectives.group_of(launch)):
            return False
        return Property.LOWERED not in self.properties and any(n in self.flow.values for n in launch.all_input_nodes)

    @functools.cached_property
    def reductions(self) -> list[fx.Node]:
        """Those of them that reduce gradients."""
        return [launch for launch in self.launches if launch.target in collectives.REDUCTIONS]

    @functools.cached_property
    def all_reduces(self) -> list[fx.Node]:
        """Those that average what the reductions leave over the replicas."""
        return [launch for launch in self.launches if launch.target in collectives.ALL_REDUCES]

    @functools.cached_property
    def gradients(self) -> dict[int, ShardGradient | None]:
        """Map each output that must be a shard's gradient -> what it is made of; `None` if it is something else."""
        return {output: gradient_of_shard(self.value_of(output)) for output in self.baseline.gradients}

    @functools.cached_property
    def slots(self) -> dict[str, list[tuple[str, int, Slot]]]:
        """What tags call a parameter -> (unit, shard, slot), for every parameter of the plan."""
        found: dict[str, list[tuple[str, int, Slot]]] = {}
        for key, unit in self.baseline.plan.units.items():
            for i, shard in enumerate(unit.shards):
                for slot in shard.slots:
                    found.setdefault(qualified(key, slot.fqn), []).append((key, i, slot))
        return found

    @functools.cached_property
    def gradient_nodes(self) -> dict[str, set[fx.Node]]:
        """FQN -> the nodes tagged as its gradients."""
        found: dict[str, set[fx.Node]] = {}
        for node in self.graph.nodes:
            for fqn in tags.meta_of(node).grads:
                found.setdefault(fqn, set()).add(node)
        return found

    def value_of(self, output: int) -> Value | None:
        """Return what is known of an output of the graph."""
        result = self.results[output] if output < len(self.results) else None
        value = self.flow.values.get(result) if isinstance(result, fx.Node) else None
        return None if isinstance(value, tuple) else value

    def read_names_of(self, node: fx.Node) -> tuple[ReadName, ...]:
        """Return the names of what a node is: a node of the graph, and a parameter if it is one."""
        if ops.is_unshard(node):
            return _read_name_of(node, self.baseline.plan), (f"%{node.name}", None)
        value = self.flow.parameters.get(node)
        if not isinstance(value, dataflow.Window | dataflow.Flat):
            return ((f"%{node.name}", None),)
        launch = value.launch if isinstance(value, dataflow.Window) else None
        unit = value.flat.unit if isinstance(value, dataflow.Window) else value.unit
        call = tags.units_of(launch).get(unit, "") if launch is not None else ""
        owner = self.baseline.plan.owner_of(unit)
        return (_parameter(owner, tags.meta_of(node).param), call or None), (f"%{node.name}", None)

    @functools.cached_property
    def results(self) -> list[fx.node.Argument]:
        """What the graph returns."""
        return signature.results_of(self.graph)


def expected_reductions(results: Sequence[fx.node.Argument]) -> dict[ParameterKey, int]:
    """Count the gradients that the markers behind a graph's outputs add up for each parameter; one may count twice."""
    return dict(Counter(ops.parameter_key_of(marker) for result in results for marker in ops.reduce_markers(result)))


def baseline_of(
    graph: fx.Graph,
    plan: FramePlan,
    kind: GraphKind,
    *,
    num_results: int | None = None,
    unsharded_budget_bytes: int | None = None,
) -> Baseline:
    """Take the baseline of a graph whose markers are tagged, before any pass of the stage."""
    results = signature.results_of(graph)
    launched = [n for n in graph.nodes if n.target in collectives.LAUNCHES and tags.meta_of(n).calls]
    flow = dataflow.dataflow_of(graph, plan) if launched else Dataflow()
    return Baseline(
        plan=plan,
        kind=kind,
        inputs=signature.inputs_of(graph),
        outputs=tuple(signature.type_of(result) for result in results),
        promised=expected_reductions(results),
        gradients=signature.gradients_of(graph),
        had_launches=bool(launched),
        sequence=sequence_of(graph),
        payloads=tuple(payload_of(launch, flow) for launch in launched),
        reads={n.name: (target_of(n), tuple(_read_name_of(a, plan) for a in reads_of(n))) for n in graph.nodes},
        calls={n.name: called for n in graph.nodes if (called := regions.called_by(n))},
        results=results_of_calls(graph),
        slots={n.name: ops.parameter_key_of(n) for n in graph.nodes if ops.is_reduce_grad(n)},
        num_results=num_results if kind == "forward" else None,
        unsharded_budget_bytes=unsharded_budget_bytes,
    )


def payload_of(launch: fx.Node, flow: Dataflow) -> tuple[str, ...]:
    """Say what a launch sends, tensor by tensor: a part of a flat, or the node behind the casts, and in which dtype."""
    return tuple(
        str(value) if isinstance(value, dataflow.Flat) else _behind_casts(source, collectives.sent_dtype(launch))
        for value, source in zip(flow.sent_by(launch), collectives.launch_inputs(launch), strict=True)
    )


def _behind_casts(node: fx.Node | None, dtype: torch.dtype | None) -> str:
    if node is None:
        return "no tensor"
    dtype = dtype or node.meta["val"].dtype
    while node.target in ops.CASTS:
        (node,) = node.all_input_nodes
    return f"%{node.name} in {text.dtype_text(dtype)}"


def find(plan: FramePlan, place: ParameterKey) -> tuple[UnitPlan, ShardPlan, Slot] | None:
    """Return what the plan has at a place, `None` for nothing."""
    unit = plan.units.get(place[0])
    shard = unit.shards[place[1]] if unit is not None and 0 <= place[1] < len(unit.shards) else None
    if unit is None or shard is None or not 0 <= place[2] < len(shard.slots):
        return None
    return unit, shard, shard.slots[place[2]]


def target_of(node: fx.Node) -> object:
    """Return what a node calls; the same for a call of a region in each of its forms."""
    return regions.INVOKE if regions.called_by(node) else node.target


def reads_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node reads, in order; each as often as it is read, but for the code that it calls."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return [source for source in found if source.op != "get_attr"]


def results_of_calls(graph: fx.Graph) -> dict[str, tuple[str, object]]:
    """Map the name of a result of a region's call -> the call's name, and which result it is."""
    reads = ((node, node.args[0]) for node in graph.find_nodes(op="call_function", target=operator.getitem))
    return {n.name: (c.name, n.args[1]) for n, c in reads if isinstance(c, fx.Node) and regions.called_by(c)}


def _read_name_of(node: fx.Node, plan: FramePlan) -> ReadName:
    found = find(plan, ops.parameter_key_of(node)) if ops.is_unshard(node) else None
    key = ops.key_of(node) if found is not None else None
    if found is None or key is None:
        return f"%{node.name}", None
    return _parameter(plan.owner_of(key.unit), qualified(key.unit, found[2].fqn)), key.call


def _parameter(unit: str, fqn: str) -> str:
    return f"{fqn} of unit {unit or 'root'!r}"


def parameter_keys_of(plan: FramePlan, unit: str, shard: int) -> Iterator[tuple[Slot, ParameterKey]]:
    """Return the parameters of a shard that have elements."""
    for i, slot in enumerate(plan.units[unit].shards[shard].slots):
        if slot.numel:
            yield slot, (unit, shard, i)


def sequence_of(graph: fx.Graph) -> tuple[str, ...]:
    """Return the launches of every group, in order: what all ranks of a group must agree on."""
    return tuple(f"{launch.group}: {launch.text}" for launch in launches.sequence(graph))
