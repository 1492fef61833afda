"""Write launches into a graph: who gathers what, who reduces what, and where they stand.

[Note: buckets]
A *bucket* is what one launch moves: segments of one unit, or of several. An all_gather stands before the first node
that reads any of its parameters; each unit's waits, and what they become, stand before the first node that reads that
unit. A reduce_scatter and its waits stand after the last gradient of the bucket.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxshard.ir import collectives, dataflow, tags
from fxshard.ir.collectives import Segment, SlotIndex
from fxshard.ir.graph_edit import Decompositions, Splicer, Traced, rename
from fxshard.ir.plan import FramePlan, UnitPlan


@dataclass(frozen=True, kw_only=True)
class UnitGather:
    """What one launch brings of one call of a unit.

    Attributes:
        unit: key in the frame's plan.
        call: which call of the unit's module.
        flats: shard index -> the graph's input.
        segments: what is sent, in this order.
        reads: parameter -> the node that stands for it now; it will be replaced.
    """

    unit: str
    call: str
    flats: Mapping[int, fx.Node]
    segments: tuple[Segment, ...]
    reads: Mapping[SlotIndex, fx.Node]


Gradient = tuple[str, SlotIndex]
"""(unit, parameter of it) whose gradient is meant."""


@dataclass(frozen=True, kw_only=True)
class ReduceBucket:
    """What one launch reduces, of one unit or of several that share a group.

    Attributes:
        tensors: the gradients that are sent together as one tensor, for each tensor.
        terms: gradient -> the nodes to be added up to it, in this order.
        calls: unit -> which call of it, for tags only.
        dtype: of the reduction.
    """

    tensors: tuple[tuple[Gradient, ...], ...]
    terms: Mapping[Gradient, Sequence[fx.Node]]
    calls: Mapping[str, str]
    dtype: torch.dtype

    @property
    def gradients(self) -> list[Gradient]:
        """All of them, in the order in which they are sent."""
        return list(itertools.chain.from_iterable(self.tensors))


Reduced = dict[str, dict[Segment, fx.Node]]
"""Unit -> gradients of it -> what they were reduced to, one after the other."""


class CollectiveBuilder:
    """Launches for one graph, written one bucket at a time; `close` comes last."""

    def __init__(self, graph: fx.Graph, plan: FramePlan, decompositions: Decompositions, traced: Traced) -> None:
        """`decompositions` are applied to what is written, so that it is of the graph's dialect; see `Splicer`."""
        self.graph, self.plan = graph, plan
        self._splicer = Splicer(graph, decompositions, traced)
        self._names: list[tuple[fx.Node, str]] = []
        self._replaced: dict[fx.Node, fx.Node] = {}

    def gather(self, bucket: Sequence[UnitGather]) -> fx.Node | None:
        """Write one launch for `bucket`, whose units share a group, and replace what its `reads` name.

        Returns:
            The launch; `None` for one rank.
        """
        flats = list(dict.fromkeys(flat for part in bucket for _, flat in sorted(part.flats.items())))
        place = {flat: i for i, flat in enumerate(flats)}
        units = [self.plan.units[part.unit] for part in bucket]

        def launch(*tensors: Tensor) -> Sequence[Tensor]:
            inputs: list[Tensor] = []
            for part, unit in zip(bucket, units, strict=True):
                shards = {i: tensors[place[flat]] for i, flat in part.flats.items()}
                inputs += collectives.gather_inputs(shards, unit, part.segments)
            return collectives.launch_gather(inputs, units[0].world_size, units[0].group)

        first = min(node for part in bucket for node in part.reads.values())
        key = (
            "gather",
            *((_layout(unit), part.segments, tuple(part.flats)) for unit, part in zip(units, bucket, strict=True)),
        )
        launched, created = self._splicer.insert(first, launch, flats, key)
        calls = {part.unit: part.call for part in bucket}
        self._tag(created, f"unshard_{self._name(list(calls), bucket[0].call)}", calls)
        rest = iter(launched)
        for part, unit in zip(bucket, units, strict=True):
            self._finish_gather(part, unit, [next(rest) for _ in part.segments])
        return _launch_among(created)

    def _finish_gather(self, part: UnitGather, unit: UnitPlan, launched: list[fx.Node]) -> None:
        reads = list(part.reads)

        def finish(*tensors: Tensor) -> Sequence[Tensor]:
            return collectives.parameters_in(tensors, unit, part.segments, reads)

        key = ("parameters", _layout(unit), part.segments, tuple(reads))
        values, created = self._splicer.insert(min(part.reads.values()), finish, launched, key)
        self._tag(created, f"wait_{self._name([part.unit], part.call)}", {part.unit: part.call})
        for (shard, slot), value in zip(reads, values, strict=True):
            tags.tag(value, tags.PARAM, self.plan.parameter_name(part.unit, shard, slot))
            if value in created:
                suffix = "" if part.call == "0" else f"_call{part.call}"
                self._names.append((value, unit.shards[shard].slots[slot].fqn.replace(".", "_") + suffix))
            old = part.reads[shard, slot]
            self._replaced[old] = value
            old.replace_all_uses_with(value)
            self.graph.erase_node(old)

    def reduce(self, reduce: ReduceBucket) -> tuple[fx.Node | None, Reduced]:
        """Write one launch.

        Returns:
            The launch, `None` for one rank, and what it reduced.
        """
        unit = self.plan.units[next(iter(reduce.calls))]
        counts = [[len(reduce.terms[gradient]) for gradient in tensor] for tensor in reduce.tensors]
        given = [node for gradient in reduce.gradients for node in reduce.terms[gradient]]
        terms = [self._replaced.get(node, node) for node in given]  # a parameter may be another one's gradient
        stretches = [[list(group) for _, group in itertools.groupby(t, key=_unit_of)] for t in reduce.tensors]
        numels = [[sum(map(self._numel, stretch)) for stretch in found] for found in stretches]

        def launch(*tensors: Tensor) -> Sequence[Tensor]:
            values = iter(tensors)
            sums = [[_sum([next(values) for _ in range(n)]) for n in ns] for ns in counts]
            inputs = collectives.reduce_inputs(sums, unit.world_size, reduce.dtype)
            return collectives.launch_reduce(inputs, reduce.dtype, unit.world_size, unit.reducing_group)

        def finish(*tensors: Tensor) -> Sequence[Tensor]:
            reduced = collectives.reduced_in(tensors, reduce.dtype, unit.world_size)
            parts = [torch.split(t, n) if len(n) > 1 else [t] for t, n in zip(reduced, numels, strict=True)]
            return list(itertools.chain.from_iterable(parts))

        anchor, name = _after(terms), self._name(list(reduce.calls))
        key = (unit.world_size, unit.reducing_group, reduce.dtype, str(counts), str(numels))
        launched, created = self._splicer.insert(anchor, launch, terms, ("reduce", *key))
        self._tag(created, f"reduce_{name}", reduce.calls)
        results, finished = self._splicer.insert(anchor, finish, launched, ("reduced", *key))
        self._tag(finished, f"reduced_{name}", reduce.calls)
        found: Reduced = {}
        for stretch, node in zip(itertools.chain.from_iterable(stretches), results, strict=True):
            found.setdefault(stretch[0][0], {})[tuple(slot for _, slot in stretch)] = node
        return _launch_among(created), found

    def _numel(self, gradient: Gradient) -> int:
        """Elements of a reduced gradient on one rank."""
        key, (shard, slot) = gradient
        return self.plan.units[key].shards[shard].slots[slot].numel

    def give_back(self, unit: str, outputs: Mapping[int, int], reduced: Mapping[Segment, fx.Node]) -> None:
        """Make the reduced gradients of a unit results of the graph.

        Args:
            unit: key in the frame's plan.
            outputs: shard index -> position among the graph's results.
            reduced: all gradients of the unit.
        """
        segments, nodes = list(reduced), list(reduced.values())

        def assemble(*tensors: Tensor) -> Sequence[Tensor]:
            shards = collectives.shard_grads(dict(zip(segments, tensors, strict=True)), self.plan.units[unit])
            return [shards[shard] for shard in sorted(outputs)]

        key = ("assemble", _layout(self.plan.units[unit]), tuple(segments), tuple(sorted(outputs)))
        values, _ = self._splicer.insert(_after(nodes), assemble, nodes, key)
        (results,) = self.graph.output_node().args
        new = list(results) if isinstance(results, list | tuple) else [results]
        for shard, value in zip(sorted(outputs), values, strict=True):
            new[outputs[shard]] = value
        self.graph.output_node().args = (tuple(new),)

    def close(self) -> None:
        """Erase what was replaced and give the new nodes their names, those of replaced nodes among them."""
        found = dataflow.dataflow_of(self.graph, self.plan)
        for node in reversed(self.graph.nodes):
            known = node in found.values or node in found.parameters
            if known and not node.users and node.op == "call_function" and not tags.grads_of(node):
                self.graph.erase_node(node)
        taken = {node.name for node in self.graph.nodes} - {node.name for node, _ in self._names}
        for node, name in self._names:
            rename(node, name, taken)

    def _tag(self, created: Sequence[fx.Node], name: str, calls: Mapping[str, str]) -> None:
        for node in created:
            if node.target is collectives.WAIT or node.target in collectives.LAUNCHES:
                self._names.append((node, name))
                tags.tag_units(node, calls)

    def _name(self, units: Sequence[str], call: str = "0") -> str:
        """`layers_0`, `layers_0_call1`, or `layers_0_to_layers_3` for a launch that serves several units."""
        names = [self.plan.units[unit].node_name for unit in units]
        if len(names) > 1:
            return f"{names[0]}_to_{names[-1]}"
        return names[0] + ("" if call == "0" else f"_call{call}")


def _layout(unit: UnitPlan) -> Hashable:
    """All of a unit that its collectives depend on: everything but names."""
    slots = tuple(
        (shard.dtype, tuple((slot.shape, slot.offset, slot.numel) for slot in shard.slots)) for shard in unit.shards
    )
    return slots, unit.world_size, unit.group, unit.reduce_group, unit.param_dtype, unit.reduce_dtype


def _unit_of(gradient: Gradient) -> str:
    return gradient[0]


def _launch_among(nodes: Sequence[fx.Node]) -> fx.Node | None:
    return next((node for node in nodes if node.target in collectives.LAUNCHES), None)


def _after(nodes: Sequence[fx.Node]) -> fx.Node:
    """The first node that comes after all of `nodes` and after the graph's inputs."""
    place = max(nodes).next  # nodes compare by their place in the graph
    while place.op == "placeholder":
        place = place.next
    return place


def sum_dtype(terms: Sequence[fx.Node]) -> torch.dtype:
    """Dtype of the sum of some gradients."""
    dtypes: list[torch.dtype] = [term.meta["val"].dtype for term in terms]
    return functools.reduce(torch.promote_types, dtypes)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
