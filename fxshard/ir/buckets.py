"""What each launch of a graph moves: read back from it, and written into it.

[Note: buckets]
A *bucket* is what one launch moves: segments of one unit, or of several. An all_gather stands before the first node
that reads any of its parameters; each unit's waits, and what they become, stand before the first node that reads that
unit. A reduce_scatter and its waits stand after the last gradient of the bucket; where replicas hold the same shard, so
does the all_reduce of what it leaves, which sends the same tensors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from fxshard.ir import collectives, dataflow, ops, signature, tags
from fxshard.ir.collectives import Segment, SlotIndex, UnitSlot
from fxshard.ir.dataflow import Flat, Piece, Window
from fxshard.ir.graph_edit import Decompositions, Splicer, TracedCode, rename
from fxshard.ir.launch_groups import following
from fxshard.ir.plan import FramePlan, UnitPlan, qualified
from fxshard.ir.tags import ShardKey
from fxshard.ir.verify import slot_layout


@dataclass(frozen=True, kw_only=True)
class UnitGather:
    """What one launch gathers for one call of a unit's module."""

    unit: str
    call: str
    flats: Mapping[int, fx.Node]  # shard index -> input of the graph
    segments: tuple[Segment, ...]  # in the order in which they are sent
    reads: Mapping[SlotIndex, fx.Node]  # parameter -> the node that stands for it now; to be replaced

    @property
    def slots(self) -> list[SlotIndex]:
        """The parameters that are sent, in registration order within each shard."""
        return sorted(itertools.chain.from_iterable(self.segments))

    @property
    def first_read(self) -> fx.Node:
        """The first node that reads one of its parameters."""
        reads = self.reads.values()
        users = [user for node in reads for user in node.users]
        return min(users, default=min(reads))  # nodes compare by their place in the graph

    def nbytes(self, plan: FramePlan) -> int:
        """Of the gathered parameters, padding included."""
        return sum(map(plan.units[self.unit].unsharded_bytes_of, self.slots))

    def copied_bytes(self, plan: FramePlan) -> int:
        """Of the shards that are copied to the device for it."""
        unit = plan.units[self.unit]
        shards = [unit.shards[i] for i in self.flats] if unit.offload is not None else []
        return sum(shard.numel * shard.dtype.itemsize for shard in shards)

    def dtypes(self, plan: FramePlan) -> set[torch.dtype]:
        """Dtypes of the gathered parameters."""
        return set(map(plan.units[self.unit].unsharded_dtype_of, self.slots))

    def sending(self, segments: Iterable[Segment]) -> UnitGather:
        """Return the same with these segments alone, without those that nothing reads."""
        read = tuple(segment for segment in segments if any(slot in self.reads for slot in segment))
        slots = set(itertools.chain.from_iterable(read))
        return replace(
            self,
            segments=read,
            flats={segment[0][0]: self.flats[segment[0][0]] for segment in read},
            reads={slot: node for slot, node in self.reads.items() if slot in slots},
        )


GatherBucket = tuple[UnitGather, ...]
"""What one launch gathers: of one unit, or of several that share a process group."""


@dataclass(frozen=True, kw_only=True)
class ReduceBucket:
    """What one launch reduces, for one unit or for several that share a process group."""

    tensors: tuple[tuple[UnitSlot, ...], ...]  # for each tensor that is sent, the gradients in it
    terms: Mapping[UnitSlot, Sequence[fx.Node]]  # gradient -> the nodes to add up, in this order
    calls: Mapping[str, str]  # unit -> which call of it; for tags only
    dtype: torch.dtype  # of the reduction

    @property
    def gradients(self) -> list[UnitSlot]:
        """All of them, in the order in which they are sent."""
        return list(itertools.chain.from_iterable(self.tensors))

    @property
    def last_term(self) -> fx.Node:
        """The node after which all of its gradients are there."""
        return max(itertools.chain.from_iterable(self.terms.values()))  # nodes compare by their place in the graph

    def nbytes(self, plan: FramePlan) -> int:
        """Of the unsharded gradients in the reduction's dtype, padding included."""
        return sum(self.unsharded_bytes_of(gradient, plan) for gradient in self.gradients)

    def unsharded_bytes_of(self, gradient: UnitSlot, plan: FramePlan) -> int:
        """Return the bytes of one unsharded gradient, padding included."""
        return self.shard_bytes_of(gradient, plan) * plan.units[unit_of(gradient)].world_size

    def shard_bytes_of(self, gradient: UnitSlot, plan: FramePlan) -> int:
        """Return the bytes of one reduced gradient on one rank."""
        unit, slot = gradient
        return plan.units[unit].slot(slot).numel * self.dtype.itemsize


Reduced = dict[str, dict[Segment, fx.Node]]
"""Unit -> gradients of it -> what they were reduced to, one after the other."""


@dataclass(kw_only=True)
class LaunchedBuckets:
    """What the launches of a graph move: launch -> bucket."""

    gathers: dict[fx.Node, GatherBucket] = field(default_factory=dict)
    reductions: dict[fx.Node, ReduceBucket] = field(default_factory=dict)
    outputs: dict[str, dict[int, int]] = field(default_factory=dict)  # unit -> shard -> index of the result
    unread: list[fx.Node] = field(default_factory=list)  # no bucket; if one reduces, no reduction is given


def early_bytes(bucket: Sequence[UnitGather], plan: FramePlan) -> int:
    """Return what there is of a bucket from its launch on that a launch for each unit would bring later."""
    copied = sum(part.copied_bytes(plan) for part in bucket)  # sent until all has arrived
    return sum(part.nbytes(plan) for part in bucket[1:]) + copied


def held_bytes(bucket: Sequence[ReduceBucket], plan: FramePlan) -> int:
    """Return the bytes of gradients that one launch for all of a bucket holds besides those of its largest part."""
    sizes = [part.nbytes(plan) for part in bucket]
    return sum(sizes) - max(sizes)


def buckets_of(graph: fx.Graph, plan: FramePlan) -> LaunchedBuckets:
    """Read back what the launches of `graph` move."""
    return _BucketReader(graph, plan).run()


def parts_of(graph: fx.Graph, plan: FramePlan) -> dict[fx.Node, str]:
    """Map launch -> what it moves of its units, where that is not all of them: `first.weight, first.bias`."""
    launched = buckets_of(graph, plan)
    moved = {
        launch: [(g.unit, slot) for g in bucket for slot in g.slots] for launch, bucket in launched.gathers.items()
    }
    moved |= {launch: bucket.gradients for launch, bucket in launched.reductions.items()}
    found: dict[fx.Node, str] = {}
    for launch, slots in moved.items():
        units = {key: plan.units[key] for key, _ in slots}
        shards = [shard for unit in units.values() for shard in unit.shards]
        everything = sum(len(s.slots) for s in shards if s.trainable or launch in launched.gathers)
        if len(slots) < everything:
            found[launch] = ", ".join(
                units[key].slot(slot).fqn.removeprefix(f"{units[key].fqn}.") for key, slot in slots
            )
    return found


def unit_of(gradient: UnitSlot) -> str:
    """Return the unit of a gradient."""
    return gradient[0]


class CollectiveBuilder:
    """Writes launches into one graph: call `rewrite`, or `gather` and `reduce` for each bucket, and `close` last."""

    def __init__(self, graph: fx.Graph, plan: FramePlan, decompositions: Decompositions, traced: TracedCode) -> None:
        """Apply `decompositions` to what is written, so that it has ops of the graph's kind; see `Splicer`."""
        self.graph, self.plan = graph, plan
        self._splicer = Splicer(graph, decompositions, traced)
        self._names: list[tuple[fx.Node, str]] = []
        self._replaced: dict[fx.Node, fx.Node] = {}

    def rewrite(
        self,
        launched: LaunchedBuckets,
        gathers: Sequence[tuple[GatherBucket, str]],
        reductions: Sequence[tuple[ReduceBucket, str]],
    ) -> list[tuple[fx.Node, str]]:
        """Replace the launches by those that `gathers` and `reductions` ask for; each bucket comes with a reason.

        A gather that the graph has already is kept. Reductions are written anew all together, or not at all. Returns
        each new launch with its reason.
        """
        made = [(self.gather(bucket), why) for bucket, why in gathers if bucket not in launched.gathers.values()]
        if [bucket for bucket, _ in reductions] != list(launched.reductions.values()):
            reduced: Reduced = {}
            for bucket, why in reductions:
                launch, results = self.reduce(bucket)
                made.append((launch, why))
                for unit, nodes in results.items():
                    reduced.setdefault(unit, {}).update(nodes)
            for unit, outputs in launched.outputs.items():
                self.return_gradients(unit, outputs, reduced[unit])
        if made:
            self.close()
        return [(launch, why) for launch, why in made if launch is not None]

    def gather(self, bucket: GatherBucket) -> fx.Node | None:
        """Launch `bucket`, of one process group, and replace its `reads`; return the launch, `None` for one rank."""
        flats = list(dict.fromkeys(flat for part in bucket for _, flat in sorted(part.flats.items())))
        place = {flat: i for i, flat in enumerate(flats)}
        units = [self.plan.units[part.unit] for part in bucket]

        def launch(*tensors: Tensor) -> Sequence[Tensor]:
            inputs: list[Tensor] = []
            for part, unit in zip(bucket, units, strict=True):
                shards = {i: tensors[place[flat]] for i, flat in part.flats.items()}
                inputs += collectives.gather_inputs(shards, unit, part.segments)
            return collectives.launch_gather(inputs, units[0].world_size, units[0].gathering_group)

        first_read = min(part.first_read for part in bucket)
        for flat in flats:
            _copy_before(first_read, flat)
        parts = [(_layout(unit), part.segments, tuple(part.flats)) for unit, part in zip(units, bucket, strict=True)]
        launched, created = self._splicer.insert(first_read, launch, flats, ("gather", *parts))
        calls = {part.unit: part.call for part in bucket}
        self._tag(created, f"unshard_{self._name(list(calls), bucket[0].call)}", calls)
        rest = iter(launched)
        for part, unit in zip(bucket, units, strict=True):
            self._wait_for_unshard(part, unit, [next(rest) for _ in part.segments])
        return _launch_among(created)

    def _wait_for_unshard(self, part: UnitGather, unit: UnitPlan, launched: list[fx.Node]) -> None:
        """Replace the `reads` of a launched gather by its parameters."""
        reads = list(part.reads)

        def wait(*tensors: Tensor) -> Sequence[Tensor]:
            return collectives.parameters_in(tensors, unit, part.segments, reads)

        key = ("parameters", _layout(unit), part.segments, tuple(reads))
        values, created = self._splicer.insert(part.first_read, wait, launched, key)
        self._tag(created, f"wait_{self._name([part.unit], part.call)}", {part.unit: part.call})
        for (shard, slot), value in zip(reads, values, strict=True):
            tags.tag(value, param=self.plan.parameter_name(part.unit, shard, slot))
            if value in created:
                suffix = "" if part.call == "0" else f"_call{part.call}"
                self._names.append((value, unit.slot((shard, slot)).fqn.replace(".", "_") + suffix))
            old = part.reads[shard, slot]
            self._replaced[old] = value
            old.replace_all_uses_with(value)
            self.graph.erase_node(old)

    def reduce(self, bucket: ReduceBucket) -> tuple[fx.Node | None, Reduced]:
        """Launch `bucket` behind its last gradient; return the launch, `None` for one rank, and what it reduced."""
        unit = self.plan.units[next(iter(bucket.calls))]
        counts = [[len(bucket.terms[gradient]) for gradient in tensor] for tensor in bucket.tensors]
        given = [node for gradient in bucket.gradients for node in bucket.terms[gradient]]
        terms = [self._replaced.get(node, node) for node in given]  # a parameter may be another one's gradient
        spans = [[list(group) for _, group in itertools.groupby(t, key=unit_of)] for t in bucket.tensors]
        numels = [[sum(map(self._numel, span)) for span in found] for found in spans]

        def launch(*tensors: Tensor) -> Sequence[Tensor]:
            values = iter(tensors)
            sums = [[functools.reduce(torch.add, [next(values) for _ in range(n)]) for n in ns] for ns in counts]
            inputs = collectives.reduce_inputs(sums, unit, bucket.dtype)
            return collectives.launch_reduce(inputs, bucket.dtype, unit)

        def launch_outer(*tensors: Tensor) -> Sequence[Tensor]:
            return collectives.launch_all_reduce(tensors, bucket.dtype, unit)

        def wait(*tensors: Tensor) -> Sequence[Tensor]:
            reduced = collectives.reduced_in(tensors, bucket.dtype, unit)
            parts = [torch.split(t, n) if len(n) > 1 else [t] for t, n in zip(reduced, numels, strict=True)]
            return list(itertools.chain.from_iterable(parts))

        anchor, name = following(max(terms)), self._name(list(bucket.calls))
        rule = collectives.division_of(unit, bucket.dtype)
        key = (*unit.groups.items(), rule, unit.all_reduces, bucket.dtype, str(counts), str(numels))
        launched, created = self._splicer.insert(anchor, launch, terms, ("reduce", *key))
        self._tag(created, f"reduce_{name}", bucket.calls)
        last, prefix = launched, "reduced"
        if unit.averages_replicas:
            last, outer = self._splicer.insert(anchor, launch_outer, launched, ("all_reduce", *key))
            self._tag([node for node in outer if collectives.is_wait(node)], f"reduced_{name}", bucket.calls)
            self._tag([node for node in outer if collectives.is_launch(node)], f"all_reduce_{name}", bucket.calls)
            created, prefix = [*created, *outer], "all_reduced"
        results, waits = self._splicer.insert(anchor, wait, last, ("reduced", *key))
        self._tag(waits, f"{prefix}_{name}", bucket.calls)
        found: Reduced = {}
        for span, node in zip(itertools.chain.from_iterable(spans), results, strict=True):
            found.setdefault(span[0][0], {})[tuple(slot for _, slot in span)] = node
        return _launch_among(created), found

    def _numel(self, gradient: UnitSlot) -> int:
        unit, slot = gradient
        return self.plan.units[unit].slot(slot).numel

    def return_gradients(self, unit: str, outputs: Mapping[int, int], reduced: Mapping[Segment, fx.Node]) -> None:
        """Make the `reduced` gradients of a unit results of the graph; `outputs` maps shard -> index of the result."""
        segments, nodes = list(reduced), list(reduced.values())

        def assemble(*tensors: Tensor) -> Sequence[Tensor]:
            shards = collectives.shard_grads(dict(zip(segments, tensors, strict=True)), self.plan.units[unit])
            return [shards[shard] for shard in sorted(outputs)]

        key = ("assemble", _layout(self.plan.units[unit]), tuple(segments), tuple(sorted(outputs)))
        values, _ = self._splicer.insert(following(max(nodes)), assemble, nodes, key)
        new = signature.results_of(self.graph)
        for shard, value in zip(sorted(outputs), values, strict=True):
            if (copy := ops.copy_to_host_behind(new[outputs[shard]])) is None:
                new[outputs[shard]] = value
                continue
            copy.update_arg(0, value)  # it comes behind, as its wait does
            value.append(copy)
            copy.append(next(iter(copy.users)))
        self.graph.output_node().args = (tuple(new),)

    def close(self) -> None:
        """Erase what was replaced and name the new nodes; they may take over names of replaced ones."""
        found = dataflow.dataflow_of(self.graph, self.plan)
        for node in reversed(self.graph.nodes):
            known = node in found.values or node in found.parameters
            if known and not node.users and node.op == "call_function" and not tags.meta_of(node).grads:
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
        """Return `layers_0`, `layers_0_call1`, or `layers_0_to_layers_3` for a launch that serves several units."""
        names = [self.plan.units[unit].node_name for unit in units]
        if len(names) > 1:
            return f"{names[0]}_to_{names[-1]}"
        return names[0] + ("" if call == "0" else f"_call{call}")


def _layout(unit: UnitPlan) -> Hashable:
    """Return all of a unit that its collectives depend on: everything but names."""
    dtypes = tuple((shard.dtype, shard.keeps_dtype, shard.grad_dtype) for shard in unit.shards)
    slots = tuple(tuple((slot.shape, slot.offset, slot.numel) for slot in shard.slots) for shard in unit.shards)
    return dtypes, slots, *unit.groups.items(), unit.param_dtype, unit.reduce_dtype


def _launch_among(nodes: Sequence[fx.Node]) -> fx.Node | None:
    return next((node for node in nodes if node.target in collectives.LAUNCHES), None)


def _copy_before(place: fx.Node, flat: fx.Node) -> None:
    """Let the copy of an offloaded shard on the device be there before `place`."""
    copy = ops.copy_to_device_behind(flat)
    for node in (copy, flat) if copy is not None else ():
        if node > place:  # nodes compare by their place in the graph
            place.prepend(node)


class _BucketReader:
    """Reads the buckets of one graph back."""

    def __init__(self, graph: fx.Graph, plan: FramePlan) -> None:
        self.graph, self.plan, self.flow = graph, plan, dataflow.dataflow_of(graph, plan)
        self.places = {
            qualified(key, slot.fqn): (key, (i, j))
            for key, unit in plan.units.items()
            if key not in plan.in_subgroups  # what a subgroup shares of a unit has the same parameters
            for i, shard in enumerate(unit.shards)
            for j, slot in enumerate(shard.slots)
        }
        self.order = {key: i for i, key in enumerate(plan.units)}
        self.found = LaunchedBuckets()
        self.gradients: dict[int, UnitSlot] = {}  # id of a row -> the parameter whose gradient it is

    def run(self) -> LaunchedBuckets:
        reads = self._reads()
        for launch in tags.launches_of(self.graph, collectives.GATHERS):
            if bucket := self._gather(launch, reads.get(launch, {})):
                self.found.gathers[launch] = bucket
            else:
                self.found.unread.append(launch)
        for position, result in enumerate(signature.results_of(self.graph)):
            if isinstance(result, fx.Node) and result.op != "placeholder":
                self._read_gradient(position, result)
        launches = tags.launches_of(self.graph, collectives.REDUCTIONS)
        reductions = {launch: self._reduction(launch) for launch in launches}
        known = {launch: reduction for launch, reduction in reductions.items() if reduction is not None}
        self.found.unread += [launch for launch in reductions if launch not in known]
        if len(known) == len(reductions):  # else a shard's gradient could be known in part
            self.found.reductions = known
        return self.found

    def _reads(self) -> dict[fx.Node, dict[UnitSlot, fx.Node]]:
        found: dict[fx.Node, dict[UnitSlot, fx.Node]] = {}
        for node, value in self.flow.parameters.items():
            place = self.places.get(tags.meta_of(node).param)
            if isinstance(value, Window) and value.launch is not None and place is not None:
                found.setdefault(value.launch, {})[value.flat.unit, place[1]] = node
        return found

    def _gather(self, launch: fx.Node, reads: dict[UnitSlot, fx.Node]) -> GatherBucket | None:
        calls, segments = tags.units_of(launch), dict[str, list[Segment]]()
        flats: dict[ShardKey, fx.Node] = {}
        for flat, sent in zip(self.flow.sent_by(launch), collectives.launch_inputs(launch), strict=True):
            if not isinstance(flat, Flat) or flat.unit not in calls or sent is None:
                return None
            segments.setdefault(flat.unit, []).append(self._segment(flat))
            flats[ShardKey(flat.unit, flat.shard)] = tags.flat_behind(sent)
        parts = []
        for unit, cut in segments.items():
            wanted = {slot: node for (key, slot), node in reads.items() if key == unit}
            shards = {i: flats[ShardKey(unit, i)] for i in {segment[0][0] for segment in cut if segment}}
            if not wanted or not all(cut):
                return None
            parts.append(UnitGather(unit=unit, call=calls[unit], flats=shards, segments=tuple(cut), reads=wanted))
        return tuple(parts)

    def _segment(self, flat: Flat) -> Segment:
        slots = enumerate(self.plan.units[flat.unit].shards[flat.shard].slots)
        end = flat.start + flat.numel
        inside = [i for i, slot in slots if flat.start <= slot.offset and slot.offset + slot.numel <= end]
        return tuple((flat.shard, i) for i in inside)

    def _read_gradient(self, position: int, result: fx.Node) -> None:
        value = self.flow.values.get(result)
        gradient = None if isinstance(value, tuple) else slot_layout.gradient_of_shard(value)
        owner = self._owner(gradient) if gradient is not None else None
        if gradient is None or owner is None:
            return
        unit, shard = owner
        self.found.outputs.setdefault(unit, {})[shard] = position
        for i, slot in enumerate(self.plan.units[unit].shards[shard].slots):
            row, _ = gradient.at(slot)
            if row is not None:
                self.gradients[id(row)] = (unit, (shard, i))

    def _reduction(self, launch: fx.Node) -> ReduceBucket | None:
        sent = [tensor for tensor in slot_layout.sent_by(launch, self.flow) if tensor is not None]
        owners = [[self.gradients.get(id(row)) for row in tensor.rows] for tensor in sent]
        tensors = tuple(tuple(owner for owner in tensor if owner is not None) for tensor in owners)
        if len(sent) < len(collectives.launch_inputs(launch)) or any(None in tensor for tensor in owners):
            return None
        rows = itertools.chain.from_iterable(tensor.rows for tensor in sent)
        terms = {g: row.terms for g, row in zip(itertools.chain.from_iterable(tensors), rows, strict=True)}
        calls = {unit: tags.units_of(launch).get(unit, "0") for unit, _ in terms}
        return ReduceBucket(tensors=tensors, terms=terms, calls=calls, dtype=sent[0].dtype)

    def _owner(self, gradient: slot_layout.ShardGradient) -> tuple[str, int] | None:
        """Return the unit and shard whose gradient this is: each slot has its own in it, or none."""
        pieces = [piece for piece in gradient.pieces if isinstance(piece, Piece)]
        launches = [piece.launch for piece in pieces if piece.launch is not None]
        if not launches or len(launches) < len(pieces):
            return None
        served = tags.units_of(launches[0])
        grads = {fqn for row in gradient.rows for fqn in tags.meta_of(row.terms[0]).grads if fqn in self.places}
        places = {(unit, shard) for unit, (shard, _) in (self.places[fqn] for fqn in grads)}
        for unit, shard in sorted(places, key=lambda place: (self.order[place[0]], place[1])):
            if unit not in served or shard in self.found.outputs.get(unit, {}):
                continue
            slots = self.plan.units[unit].shards[shard].slots
            found = [(qualified(unit, slot.fqn), gradient.at(slot)[0]) for slot in slots]
            rows = [(name, row) for name, row in found if row is not None]
            if rows and all(name in tags.meta_of(row.terms[0]).grads for name, row in rows):
                return unit, shard
        return None
