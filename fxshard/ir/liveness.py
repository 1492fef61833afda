"""When the memory behind a graph's values is allocated and freed: one interval of nodes per storage.

[Note: liveness]
Views have no memory of their own, so what lives and dies is a *storage*. It is born at the node that allocates it and
dies after the last node that reads any view of it, with three exceptions:

- What a launch reads and fills is in use until its last wait: the process group holds it until then. So is what a side
  stream copies, until the wait for the copy.
- The graph's results live to the end.
- The graph's inputs are the caller's and live throughout. Only the activations that forward saved for backward are
  handed over (`donated`) and freed after their last use. Parameters among them count without padding.

Which storage a value has follows from the ops' schemas, not from the fake tensors alone: a pass that replaces a node
brings a new fake tensor, while the views of the old one still carry theirs.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxshard import torch_private
from fxshard.ir import collectives, ops, tags
from fxshard.ir.surroundings import leaves

UNBACKED_HINT = 8192
"""What a size that only the data knows counts for."""

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""A view whose schema does not say so."""

_COPIES_ASIDE = (ops.COPY_OUT, *ops.BETWEEN_HOST_AND_DEVICE)
"""Copies on a side stream, which read and fill until their wait."""

_COPY_OUTS = (torch.ops.aten.clone, torch.ops.aten.split_with_sizes_copy)
"""What copying parameters out of the gathered buffer is made of, besides views."""


@dataclass(slots=True, kw_only=True)
class Storage:
    """One allocation."""

    maker: fx.Node  # the node that allocates it, or the input that brings it
    tensor: Tensor  # a fake tensor in it
    birth: int  # index of the first node that needs it, 0 for an input
    last_use: int  # index of the last node that needs it

    @property
    def nbytes(self) -> int | torch.SymInt:
        """Bytes, symbolic where a shape is."""
        return self.tensor.untyped_storage().nbytes()


class InUse(NamedTuple):
    """What a launch, or a copy on a side stream, reads and fills until somebody has waited for one of its results."""

    user: fx.Node  # the launch or copy
    until: int  # index of the wait
    storages: tuple[int, ...]  # indices


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """The storages of a graph; see [Note: liveness]."""

    nodes: tuple[fx.Node, ...]  # in program order
    storages: tuple[Storage, ...]  # in program order of their makers
    storages_of: dict[fx.Node, tuple[int, ...]]  # for each tensor in a node's value, the storage's index
    in_use: tuple[InUse, ...]  # one for each result of a launch or copy

    def running_sum(self, sizes: Sequence[float]) -> list[float]:
        """Return for each node the sum of `sizes` over the storages that are live while it runs."""
        changes: list[float] = [0] * (len(self.nodes) + 1)
        for storage, size in zip(self.storages, sizes, strict=True):
            changes[storage.birth] += size
            changes[storage.last_use + 1] -= size
        return list(itertools.accumulate(changes[:-1]))

    def allocates(self, node: fx.Node) -> bool:
        """Return whether `node` makes memory of its own; a view does not."""
        return any(self.storages[index].maker is node for index in self.storages_of[node])


def liveness(graph: fx.Graph, *, donated: bool = False) -> Liveness:
    """Find the storages of a graph of AOTAutograd's and when they are live; `donated` as for a backward."""
    return _Sweep(graph, donated).run()


def unsharded_bytes(graph: fx.Graph) -> list[tuple[fx.Node, int]]:
    """Return for each node the bytes of gathered buffers, parameters in them and copies of shards that are live."""
    live = liveness(graph, donated=True)  # parameters that forward kept for backward are freed like activations
    counted = unsharded_storages(live)
    sizes = [hint_of(storage.nbytes) if i in counted else 0 for i, storage in enumerate(live.storages)]
    return [(node, int(size)) for node, size in zip(live.nodes, live.running_sum(sizes), strict=True)]


def written_in_use(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Find each op that writes what a launch or a copy on a side stream is using; yield the user and the op."""
    written = {node: found for node in graph.nodes if (found := written_by(node))}
    if not written:
        return
    live = liveness(graph)
    places = {node: position for position, node in enumerate(live.nodes)}
    writers: dict[int, list[tuple[int, fx.Node]]] = {}
    for node, inputs in written.items():
        for index in (i for source in inputs for i in live.storages_of[source]):
            writers.setdefault(index, []).append((places[node], node))
    for user, until, storages in live.in_use:
        for position, node in (found for index in storages for found in writers.get(index, ())):
            if places[user] < position < until:
                yield user, node


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that an op writes to."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | node.kwargs
    written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    values = [given.get(name) for name in written]
    leaves = [leaf for value in values for leaf in (value if isinstance(value, list | tuple) else [value])]
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def unsharded_storages(live: Liveness) -> frozenset[int]:
    """Return the indices of the storages that hold unsharded parameters."""
    found: set[int] = set()
    on_the_way: set[fx.Node] = set()  # from a launch to the parameters copied out of it
    for node in live.nodes:
        meta = tags.meta_of(node)
        if meta.param or meta.kept or ops.is_unshard(node):
            # One rank's parameter is a view of its shard, which is there anyway.
            shards = (live.storages[i].maker for i in live.storages_of[node])
            if not any(tags.meta_of(maker).shard for maker in shards):
                found.update(live.storages_of[node])
        elif node.target is ops.COPY_TO_DEVICE:
            found.update(live.storages_of[node])
        elif (node.target in collectives.GATHERS and meta.calls) or (
            _passes_on(node, live) and node.all_input_nodes[0] in on_the_way
        ):
            on_the_way.add(node)
            found.update(live.storages_of[node])
    return frozenset(found)


def hint_of(size: int | torch.SymInt) -> int:
    """Return the value that `size` had when the graph was traced; this adds no guard."""
    if isinstance(size, int):
        return size
    hint, expression = size.node.hint, size.node.expr
    if hint is not None:
        return int(hint)
    known = torch_private.sizes_when_traced(size.node.shape_env)
    return int(expression.subs({symbol: known.get(symbol, UNBACKED_HINT) for symbol in expression.free_symbols}))


def tensors_in(node: fx.Node) -> list[Tensor]:
    """Return the tensors that a node's value consists of, in order; a tuple may hold tuples."""
    return leaves(node.meta.get("val"), Tensor)


def _passes_on(node: fx.Node, live: Liveness) -> bool:
    """Return whether `node` is a view, a wait or a plain copy of its first input."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    copies = node.target is ops.COPY_OUT or getattr(node.target, "overloadpacket", None) in _COPY_OUTS
    return copies or not live.allocates(node)


@functools.cache
def _aliases(target: torch._ops.OpOverload) -> tuple[tuple[int, str] | None, ...]:
    """Return for each result of an op the argument (position, name) in whose memory it lies."""
    if target in (_UNSAFE_VIEW, *collectives.WAITS):
        return ((0, target._schema.arguments[0].name),)
    found: list[tuple[int, str] | None] = []
    arguments = [(i, a.name, a.alias_info.before_set) for i, a in enumerate(target._schema.arguments) if a.alias_info]
    for result in target._schema.returns:
        if result.alias_info is None or not arguments:
            found.append(None)
            continue
        # A returned list names its alias set on its elements, where Python cannot see it: there is one argument then.
        shared = (argument for argument in arguments if argument[2] & result.alias_info.before_set)
        found.append(next(shared, arguments[0])[:2])
    return tuple(found)


class _Sweep:
    """One walk over a graph, in program order."""

    def __init__(self, graph: fx.Graph, donated: bool) -> None:
        self.nodes, self.donated = tuple(graph.nodes), donated
        self.storages: list[Storage] = []
        self.storages_of: dict[fx.Node, tuple[int, ...]] = {}
        self.by_id: dict[int, int] = {}  # of a fake tensor's storage; decides only where no schema does
        self.pinned: set[int] = set()  # the caller's
        self.in_flight: dict[int, InUse] = {}  # by what is filled
        self.in_use: list[InUse] = []

    def run(self) -> Liveness:
        for position, node in enumerate(self.nodes):
            for source in node.all_input_nodes:
                for index in self.storages_of[source]:
                    self.storages[index].last_use = position
            made = self.storages_of[node] = self._storages(node, position)
            read = tuple(i for source in node.all_input_nodes for i in self.storages_of[source])
            if collectives.is_wait(node):
                for filled in read:
                    self._end(filled, position)
            elif (collectives.is_launch(node) and not collectives.waits_itself(node)) or node.target in _COPIES_ASIDE:
                behind = [self.in_flight.pop(index) for index in read if index in self.in_flight]  # a copy waits for it
                self.in_use += [launch._replace(until=position) for launch in behind]
                used = (*read, *(i for launch in behind for i in launch.storages), *made)
                self.in_flight |= dict.fromkeys(made, InUse(node, position, used))
        end = len(self.nodes) - 1
        self._use(sorted(self.pinned), end)
        for filled in list(self.in_flight):  # never waited for
            self._end(filled, end)
        return Liveness(
            nodes=self.nodes, storages=tuple(self.storages), storages_of=self.storages_of, in_use=tuple(self.in_use)
        )

    def _end(self, filled: int, position: int) -> None:
        found = self.in_flight.pop(filled, None)
        if found is not None:
            self._use(found.storages, position)
            self.in_use.append(found._replace(until=position))

    def _use(self, indices: Sequence[int], position: int) -> None:
        for index in indices:
            self.storages[index].last_use = position

    def _storages(self, node: fx.Node, position: int) -> tuple[int, ...]:
        tensors = tensors_in(node)
        if not tensors:
            return ()
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            return self._of_op(node, node.target, tensors, position)
        if node.target is operator.getitem and (elements := self._elements(node)) is not None:
            self.by_id |= zip(map(torch_private.storage_id, tensors), elements, strict=True)
            return elements
        if node.op not in ("placeholder", "get_attr"):
            return tuple(self._known_or_new(node, tensor, position) for tensor in tensors)
        found = tuple(self._known_or_new(node, tensor, position) for tensor in tensors)
        self._use(found, position)
        for index in found:
            self.storages[index].birth = 0
        if not (self.donated and _is_saved(node)):
            self.pinned.update(found)
        return found

    def _of_op(
        self, node: fx.Node, target: torch._ops.OpOverload, tensors: list[Tensor], position: int
    ) -> tuple[int, ...]:
        """Follow the schema: each result lies in an argument, or is new."""
        sources = [self._source(node, alias) for alias in _aliases(target)]
        if len(sources) != len(tensors):  # a list of tensors is one return
            sources = sources[:1] * len(tensors)
        found = []
        for tensor, source in zip(tensors, sources, strict=True):
            index = self._new(node, tensor, position) if source is None else source
            self.by_id[torch_private.storage_id(tensor)] = index
            found.append(index)
        return tuple(found)

    def _source(self, node: fx.Node, alias: tuple[int, str] | None) -> int | None:
        if alias is None:
            return None
        position, name = alias
        argument: Any = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        return next(iter(self.storages_of[argument]), None) if isinstance(argument, fx.Node) else None

    def _elements(self, node: fx.Node) -> tuple[int, ...] | None:
        """Return the storages of a tuple's element, which may be a tuple."""
        parent, index = node.args
        assert isinstance(parent, fx.Node)
        value = parent.meta.get("val")
        if not isinstance(index, int) or not isinstance(value, list | tuple):
            return None
        before = len(leaves(value[:index], Tensor))
        return self.storages_of[parent][before : before + len(leaves(value[index], Tensor))]

    def _known_or_new(self, node: fx.Node, tensor: Tensor, position: int) -> int:
        known = self.by_id.get(torch_private.storage_id(tensor))
        return self._new(node, tensor, position) if known is None else known

    def _new(self, node: fx.Node, tensor: Tensor, position: int) -> int:
        self.storages.append(Storage(maker=node, tensor=tensor, birth=position, last_use=position))
        self.by_id[torch_private.storage_id(tensor)] = len(self.storages) - 1
        return len(self.storages) - 1


def _is_saved(placeholder: fx.Node) -> bool:
    """Return whether an input of backward is an activation that forward saved."""
    meta = tags.meta_of(placeholder)  # with a shard: what a subgroup keeps
    return not placeholder.name.startswith(torch_private.CALLERS_INPUTS) and not (meta.acc or meta.resident)
