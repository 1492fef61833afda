"""How many bytes each storage and each launch of a graph has: expressions of the world size where the plan knows them.

[Note: open world size]
A graph is traced for one world size, and its shapes are numbers of that size. The plan knows better: a slot has
`ceil(rows / world_size)` rows, whatever the world size. So the flats, the gathered buffers, the parameters copied out
of them, the reduction's buffers and their casts get the plan's expression; everything else keeps its traced size. An
expression is used only if it gives the traced number of bytes at the traced world size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx

from fxshard.cost.symbols import WORLD_SIZE, Point, Quantity, Sum, hints_of, product, size_of
from fxshard.ir import collectives, ops, tags
from fxshard.ir.liveness import Liveness, liveness, tensors_in
from fxshard.ir.plan import FramePlan, ShardPlan, Slot, UnitPlan, qualified

_ELEMENTWISE = frozenset(("_to_copy", "convert_element_type", "div", "clone"))
"""Ops between a flat or a reduced gradient and what is launched or returned."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The memory of a graph."""

    live: Liveness  # its storages
    point: Point  # the world size and shapes that it was traced with
    of_storage: tuple[Quantity, ...]  # bytes of each of `live.storages`
    of_launch: dict[fx.Node, Quantity]  # bytes of the whole buffer (all ranks' shards) of each launch
    open_groups: frozenset[str]  # process groups whose size is the world size
    group_sizes: Mapping[str, int]  # of all of the plan, as traced
    axes: Mapping[str, str]  # process group -> mesh axis of the user's own DTensors that it is of


def sizes_of(graph: fx.Graph, plan: FramePlan, *, donated: bool = False) -> Sizes:
    """Measure a graph of AOTAutograd, before or after any pass; `donated` as in `liveness`."""
    world_size = max((unit.world_size for unit in plan.units.values()), default=1)
    point = Point(world_size=world_size, hints=hints_of(graph))
    units = {key: unit for key, unit in plan.units.items() if unit.world_size == world_size}
    group_sizes = {axis.group: axis.size for axis in plan.model_axes}
    group_sizes |= {name: size for unit in plan.units.values() for name, size in unit.groups.items()}
    axes = {axis.group: axis.name for axis in plan.model_axes}
    return _Measurement(liveness(graph, donated=donated), point, units, group_sizes, axes).run()


def sizes_inside(code: fx.GraphModule, outside: Sizes) -> Sizes:
    """Measure a region that a graph calls; no unit launches anything in it."""
    return _Measurement(liveness(code.graph), outside.point, {}, outside.group_sizes, outside.axes).run()


def numel_of(tensor: Tensor) -> Quantity:
    """Elements of a tensor; adds no guard."""
    return product(size_of(size) for size in tensor.shape)


def nbytes_of(tensor: Tensor) -> Quantity:
    """Bytes of a tensor's elements; adds no guard."""
    return numel_of(tensor) * tensor.dtype.itemsize


def slot_numel(slot: Slot) -> Quantity:
    """Elements of a slot on one rank, as an expression of the world size."""
    return product(slot.shape[1:]) * _chunk(slot.shape[0]) if slot.shape else 1


def shard_numel(shard: ShardPlan) -> Quantity:
    """Elements of a shard on one rank, as an expression of the world size."""
    return sympy.Add(*map(slot_numel, shard.slots))


@functools.cache
def _chunk(rows: int) -> Quantity:
    return sympy.ceiling(sympy.Integer(rows) / WORLD_SIZE)


class _Measurement:
    """One walk over a graph that finds what the plan knows about its storages."""

    def __init__(
        self,
        live: Liveness,
        point: Point,
        units: dict[str, UnitPlan],
        group_sizes: Mapping[str, int],
        axes: Mapping[str, str],
    ) -> None:
        self.live, self.point, self.units, self.group_sizes, self.axes = live, point, units, group_sizes, axes
        self.slots = {
            qualified(key, slot.fqn): slot
            for key, unit in units.items()
            for shard in unit.shards
            for slot in shard.slots
        }
        self.sizes: list[Quantity] = [size_of(storage.nbytes) for storage in live.storages]
        self.elements: dict[int, Quantity] = {}  # storage -> expression that the plan has for it
        self.launches: dict[fx.Node, Quantity] = {}

    def run(self) -> Sizes:
        for node in self.live.nodes:
            if collectives.is_launch(node):
                self._measure_launch(node)
            for storage, elements in self._known(node):
                self._set(storage, elements)
        return Sizes(
            live=self.live,
            point=self.point,
            of_storage=tuple(self.sizes),
            of_launch=self.launches,
            open_groups=frozenset(
                g for unit in self.units.values() for g in (unit.gathering_group, unit.reducing_group)
            ),
            group_sizes=self.group_sizes,
            axes=self.axes,
        )

    def _set(self, storage: int, elements: Quantity) -> None:
        nbytes = elements * self.live.storages[storage].tensor.dtype.itemsize
        if self.point.value(nbytes) == self.sizes[storage]:
            self.elements[storage], self.sizes[storage] = elements, nbytes

    def _known(self, node: fx.Node) -> Iterator[tuple[int, Quantity]]:
        """Storages of `node` that the plan describes, and their elements."""
        made = self.live.storages_of[node]
        meta = tags.meta_of(node)
        if meta.shard is not None:
            if meta.shard.unit in self.units:
                yield made[0], shard_numel(self.units[meta.shard.unit].shards[meta.shard.number])
        elif ops.is_reduce_grad(node):
            key = ops.key_of(node)
            if key.unit in self.units:
                yield made[0], shard_numel(self.units[key.unit].shards[key.shard])
        elif meta.param in self.slots and not ops.is_unshard(node):
            yield made[0], WORLD_SIZE * slot_numel(self.slots[meta.param])
        elif _is_elementwise(node):
            sources = self.live.storages_of[node.all_input_nodes[0]]
            yield from ((made[0], self.elements[i]) for i in sources if i in self.elements and made)

    def _measure_launch(self, launch: fx.Node) -> None:
        """Fill in `launches`, and what the plan knows of the launch's storages."""
        filled, read = self.live.storages_of[launch], [t for s in launch.all_input_nodes for t in tensors_in(s)]
        nbytes = Sum()
        if launch.target in collectives.ALL_REDUCES and tags.units_of(launch):
            for sent, storage in zip(launch.all_input_nodes, filled, strict=True):
                (origin,) = self.live.storages_of[sent]
                if origin in self.elements:
                    self._set(storage, self.elements[origin])
                nbytes.add(self.sizes[storage])
        elif launch.target in collectives.LAUNCHES and launch.target not in collectives.ALL_REDUCES:
            known = self._slots_reduced if launch.target in collectives.REDUCTIONS else self._slots_gathered
            inputs = collectives.launch_inputs(launch)
            for i, (storage, result, source) in enumerate(zip(filled, tensors_in(launch), inputs, strict=True)):
                assert source is not None
                nbytes.add(self._measure_tensor(launch, storage, result, source, known(launch, i, result, source)))
        else:
            sides = [Sum(map(nbytes_of, tensors)).total for tensors in (read, tensors_in(launch))]
            nbytes.add(max(sides, key=self.point.value))
        self.launches[launch] = nbytes.total

    def _measure_tensor(
        self, launch: fx.Node, storage: int, result: Tensor, source: fx.Node, slots: Sequence[Slot]
    ) -> Quantity:
        """Fill in what is known of one tensor of a launch, and give the bytes of its whole buffer."""
        reduces = launch.target in collectives.REDUCTIONS
        (sent,) = tensors_in(source)
        if not slots:
            return (numel_of(sent) * result.dtype.itemsize) if reduces else nbytes_of(result)
        shard_elements = sympy.Add(*map(slot_numel, slots))
        self._set(storage, shard_elements if reduces else WORLD_SIZE * shard_elements)
        for node in _through_elementwise(source) if reduces else ():
            self._set(self.live.storages_of[node][0], WORLD_SIZE * shard_elements)
        return WORLD_SIZE * shard_elements * result.dtype.itemsize

    def _slots_gathered(self, launch: fx.Node, index: int, result: Tensor, source: fx.Node) -> Sequence[Slot]:
        """The slots in an all_gather's input: a shard, a span of it, or a cast of either."""
        start, numel = collectives.sent_part(launch, index) or (0, tensors_in(source)[0].numel())
        for node in _through_elementwise(source, and_slices=True):
            if node.target is torch.ops.aten.slice.Tensor:
                first = node.args[2] if len(node.args) > 2 else 0
                start += first if isinstance(first, int) else 0
            shard = tags.meta_of(node).shard
            if shard is not None and shard.unit in self.units:
                slots, end = self.units[shard.unit].shards[shard.number].slots, start + numel
                found = [slot for slot in slots if start <= slot.offset and slot.offset + slot.numel <= end]
                fits = sum(slot.numel for slot in found) * self.point.world_size == numel_of(result)
                return found if fits else ()
        return ()

    def _slots_reduced(self, launch: fx.Node, index: int, result: Tensor, source: fx.Node) -> Sequence[Slot]:
        """The slots that a reduce_scatter leaves on one rank; none if that cannot be told."""
        traced = numel_of(result)
        candidates = self._slots_likely_reduced(launch, source)
        return next((slots for slots in candidates if sum(slot.numel for slot in slots) == traced), ())

    def _slots_likely_reduced(self, launch: fx.Node, source: fx.Node) -> Iterator[Sequence[Slot]]:
        """One trained shard of the launch's units, all of a unit's, or those whose gradients can be seen to go in."""
        for unit in (self.units[key] for key in tags.units_of(launch) if key in self.units):
            trained = [shard.slots for shard in unit.shards if shard.trainable]
            yield from trained
            yield [slot for slots in trained for slot in slots]
        yield [self.slots[fqn] for fqn in _grads_into(source) if fqn in self.slots]


def _is_elementwise(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._opname in _ELEMENTWISE and bool(node.all_input_nodes)


def _through_elementwise(node: fx.Node, *, and_slices: bool = False) -> Iterator[fx.Node]:
    """`node`, and what it was made of by elementwise ops alone, or slices as well."""
    yield node
    while _is_elementwise(node) or (and_slices and node.target is torch.ops.aten.slice.Tensor):
        node = node.all_input_nodes[0]
        yield node


def _grads_into(source: fx.Node, limit: int = 4096) -> Sequence[str]:
    """FQNs of the gradients that are copied into what a launch sends; looks at no more than `limit` nodes."""
    found: dict[str, None] = {}
    waiting, seen = [source], {source}
    while waiting and len(seen) < limit:
        node = waiting.pop()
        grads = tags.meta_of(node).grads
        found |= dict.fromkeys(grads)
        sources = [] if grads else [source for source in node.all_input_nodes if source not in seen]
        seen.update(sources)
        waiting += sources
    return list(found)
