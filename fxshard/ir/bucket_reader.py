"""Read back from a graph what its launches move, in the terms in which `ir/buckets.py` writes them, and rewrite it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from fxshard.ir import collectives, dataflow, tags
from fxshard.ir.buckets import CollectiveBuilder, Gradient, ReduceBucket, Reduced, UnitGather
from fxshard.ir.collectives import Segment, SlotIndex
from fxshard.ir.dataflow import Flat, Piece, Window
from fxshard.ir.plan import FramePlan, qualified
from fxshard.ir.verify import baseline, slot_layout


@dataclass(kw_only=True)
class BucketLaunches:
    """The launches of a graph that could be read back.

    Attributes:
        gathers: launch -> what it brings, by unit.
        reductions: launch -> what it reduces.
        outputs: unit -> shard index -> position of its gradient among the graph's results.
        unread: launches with something else in them; if one of these reduces, no reduction is given.
    """

    gathers: dict[fx.Node, list[UnitGather]] = field(default_factory=dict)
    reductions: dict[fx.Node, ReduceBucket] = field(default_factory=dict)
    outputs: dict[str, dict[int, int]] = field(default_factory=dict)
    unread: list[fx.Node] = field(default_factory=list)


def launched_in(graph: fx.Graph, plan: FramePlan) -> BucketLaunches:
    """Read the launches of `graph` back."""
    return _BucketReader(graph, plan).run()


def rewrite(
    writer: CollectiveBuilder,
    found: BucketLaunches,
    gathers: Iterable[tuple[Sequence[UnitGather], str]],
    reductions: Iterable[tuple[ReduceBucket, str]],
) -> list[tuple[fx.Node, str]]:
    """Replace launches by others that move the same.

    Args:
        writer: for the graph that `found` was read from.
        found: what its launches move now.
        gathers: what they should move, and why; those that the graph has already are kept.
        reductions: the same; written anew all together, if at all.

    Returns:
        Each new launch, and why it is as it is.
    """
    made = [(writer.gather(parts), why) for parts, why in gathers if list(parts) not in found.gathers.values()]
    wanted = list(reductions)
    if [reduction for reduction, _ in wanted] != list(found.reductions.values()):
        reduced: Reduced = {}
        for reduction, why in wanted:
            launch, results = writer.reduce(reduction)
            made.append((launch, why))
            for unit, nodes in results.items():
                reduced.setdefault(unit, {}).update(nodes)
        for unit, outputs in found.outputs.items():
            writer.give_back(unit, outputs, reduced[unit])
    if made:
        writer.close()
    return [(launch, why) for launch, why in made if launch is not None]


class _BucketReader:
    def __init__(self, graph: fx.Graph, plan: FramePlan) -> None:
        self.graph, self.plan, self.flow = graph, plan, dataflow.dataflow_of(graph, plan)
        self.places = {
            qualified(key, slot.fqn): (key, (i, j))
            for key, unit in plan.units.items()
            for i, shard in enumerate(unit.shards)
            for j, slot in enumerate(shard.slots)
        }
        self.found = BucketLaunches()
        self.gradients: dict[int, Gradient] = {}  # id of a row -> the parameter whose gradient it is

    def run(self) -> BucketLaunches:
        flats = dict(_flats(self.graph))
        reads = self._reads()
        for launch in collectives.unshard_launches(self.graph):
            if gathers := self._gathers(launch, reads.get(launch, {}), flats):
                self.found.gathers[launch] = gathers
            else:
                self.found.unread.append(launch)
        for position, result in enumerate(baseline.results_of(self.graph)):
            if isinstance(result, fx.Node) and result.op != "placeholder":
                self._read_gradient(position, result)
        reductions = {launch: self._reduction(launch) for launch in collectives.reduce_launches(self.graph)}
        known = {launch: reduction for launch, reduction in reductions.items() if reduction is not None}
        self.found.unread += [launch for launch in reductions if launch not in known]
        if len(known) == len(reductions):  # else a shard's gradient could be known in part
            self.found.reductions = known
        return self.found

    def _reads(self) -> dict[fx.Node, dict[tuple[str, SlotIndex], fx.Node]]:
        """Launch -> parameter -> its node."""
        found: dict[fx.Node, dict[tuple[str, SlotIndex], fx.Node]] = {}
        for node, value in self.flow.parameters.items():
            place = self.places.get(tags.tags_of(node)[tags.PARAM])
            if isinstance(value, Window) and value.launch is not None and place is not None:
                found.setdefault(value.launch, {})[place] = node
        return found

    def _gathers(
        self,
        launch: fx.Node,
        reads: dict[tuple[str, SlotIndex], fx.Node],
        flats: dict[tuple[str, int], fx.Node],
    ) -> list[UnitGather]:
        calls, segments = tags.units_of(launch), dict[str, list[Segment]]()
        for flat in self.flow.sent_by(launch):
            if not isinstance(flat, Flat) or flat.unit not in calls:
                return []
            segments.setdefault(flat.unit, []).append(self._segment(flat))
        gathers = []
        for unit, cut in segments.items():
            wanted = {slot: node for (key, slot), node in reads.items() if key == unit}
            shards = {i: flats[unit, i] for i in {segment[0][0] for segment in cut if segment}}
            if not wanted or not all(cut):
                return []
            gathers.append(UnitGather(unit=unit, call=calls[unit], flats=shards, segments=tuple(cut), reads=wanted))
        return gathers

    def _segment(self, flat: Flat) -> Segment:
        slots = enumerate(self.plan.units[flat.unit].shards[flat.shard].slots)
        end = flat.start + flat.numel
        inside = [i for i, slot in slots if flat.start <= slot.offset and slot.offset + slot.numel <= end]
        return tuple((flat.shard, i) for i in inside)

    def _read_gradient(self, position: int, result: fx.Node) -> None:
        """Where each gradient in one result comes from."""
        value = self.flow.values.get(result)
        segments = (None if isinstance(value, tuple) else slot_layout.segments_of(value)) or []
        pieces = [piece for _, _, piece in segments if isinstance(piece, Piece)]
        owner = self._owner(segments) if pieces and all(piece.launch for piece in pieces) else None
        if owner is None:
            return
        unit, shard = owner
        self.found.outputs.setdefault(unit, {})[shard] = position
        for i, slot in enumerate(self.plan.units[unit].shards[shard].slots):
            row = slot_layout.row_at(segments, slot)
            if row is not None:
                self.gradients[id(row)] = (unit, (shard, i))

    def _reduction(self, launch: fx.Node) -> ReduceBucket | None:
        """What a launch reduces; `None` if a part of it is no unit's gradient."""
        sent = [tensor for tensor in slot_layout.sent_by(launch, self.flow) if tensor is not None]
        owners = [[self.gradients.get(id(row)) for row in tensor.rows] for tensor in sent]
        tensors = tuple(tuple(owner for owner in tensor if owner is not None) for tensor in owners)
        if len(sent) < len(collectives.launch_inputs(launch)) or any(None in tensor for tensor in owners):
            return None
        rows = itertools.chain.from_iterable(tensor.rows for tensor in sent)
        terms = {g: row.terms for g, row in zip(itertools.chain.from_iterable(tensors), rows, strict=True)}
        calls = {unit: tags.units_of(launch).get(unit, "0") for unit, _ in terms}
        return ReduceBucket(tensors=tensors, terms=terms, calls=calls, dtype=sent[0].dtype)

    def _owner(self, segments: list[slot_layout.GradientSpan]) -> tuple[str, int] | None:
        """The unit and shard whose gradient this is: every slot has its own gradient in it, or none."""
        first = next(piece for _, _, piece in segments if isinstance(piece, Piece)).concat.rows[0]
        for fqn in tags.grads_of(first.terms[0]):
            unit, (shard, _) = self.places.get(fqn, ("", (-1, 0)))
            slots = self.plan.units[unit].shards[shard].slots if shard >= 0 else ()
            rows = [(qualified(unit, slot.fqn), slot_layout.row_at(segments, slot)) for slot in slots]
            if rows and all(row is None or name in tags.grads_of(row.terms[0]) for name, row in rows):
                return unit, shard
        return None


def _flats(graph: fx.Graph) -> Iterator[tuple[tuple[str, int], fx.Node]]:
    for node in graph.find_nodes(op="placeholder"):
        unit, _, shard = tags.tags_of(node).get(tags.SHARD, "").rpartition("#")
        if shard:
            yield (unit, int(shard)), node
