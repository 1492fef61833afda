"""Reduce zeros for the parameters of a unit that a graph gives no gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from fxshard import torch_private
from fxshard.errors import UnsupportedGraph
from fxshard.ir import ops, signature, tags
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.ops import MarkerKey
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class ReduceUnused(GraphPass):
    """Read all of a unit in backward, and let what has no gradient have zeros.

    Before   %r = reduce_grad(%dw, 'experts', 0)   return %r
    After    %w = unshard(%shard, 'experts', 0)    %v = unshard(%shard, 'experts', 1)
             %z = zero_gradient([%w, %v], 1)       %s = reduce_grad(%z, 'experts', 1)   return add(%r, %s)

    For ranks that take other branches of a unit (`set_reduce_scatter_unused_params`): each has a graph of its own, and
    all must launch the same. As in FSDP2 backward then gathers the whole unit, whatever it reads of it, and reduces
    all of it. Where every parameter has a gradient, the smallest one gets zeros as one more, for the sake of the
    gather. A unit that is kept is not gathered again; its zeros read nothing. What else decides launches by the compute
    of one graph is left out of the pipeline (`in_step` in `pipeline.py`).

    Numerics: as FSDP2; zeros are added where others have a gradient. Memory: the zeros, until they are reduced.
    No-op: no unit has the mode; a graph without backward.
    Limits: a unit whose parameters are of several dtypes, or partly frozen, is refused where a graph reads nothing of
        one kind: what is not an input of the graph cannot be gathered in it.
    Source: FSDP2 `_fsdp_param_group.py` (`reduce_scatter_unused_params`).
    """

    requires = frozenset({Property.DEDUPED})
    changes_signature = True  # what had no gradient has one

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        return any([_Completion(key, gm.graph, ctx).run() for key in ctx.plan.in_step])


class _Completion:
    """Gives all trained parameters of one unit a gradient, and has backward read all of it in each call."""

    def __init__(self, key: str, graph: fx.Graph, ctx: PassContext) -> None:
        self.key, self.graph, self.ctx, self.unit = key, graph, ctx, ctx.plan.units[key]
        self.slots = [(i, j) for i, shard in enumerate(self.unit.shards) for j in range(len(shard.slots))]
        markers = [node for node in graph.nodes if ops.is_unshard(node) or ops.is_reduce_grad(node)]
        mine = [node for node in markers if ops.key_of(node).unit == key]
        self.reads: dict[tuple[str, SlotIndex], fx.Node]
        self.reads = {(ops.key_of(node).call, _slot(node)): node for node in mine if ops.is_unshard(node)}
        self.given = {_slot(node): node for node in reversed(mine) if ops.is_reduce_grad(node)}
        self.anchor = min(self.given.values(), default=graph.output_node())  # nodes compare by their place
        self.flats = {shard.number: flat for shard, flat in tags.shards_of(graph).items() if shard.unit == key}

    def run(self) -> bool:
        trained = [slot for slot in self.slots if self.unit.shards[slot[0]].trainable]
        done = any(user.target is ops.ZERO_GRADIENT for node in self.reads.values() for user in node.users)
        if done or not trained:
            return False
        self._require_all_shards()
        unused = [slot for slot in trained if slot not in self.given]
        smallest = min(trained, key=lambda slot: self.unit.slot(slot).full_numel)
        calls = list(dict.fromkeys(call for call, _ in self.reads))
        for slot in unused or ([smallest] if self.unit.regathers else []):
            self._reduce_zeros(calls[0], slot)
        for call in calls[1:] if self.unit.regathers else ():
            self._reduce_zeros(call, smallest)
        return bool(unused) or self.unit.regathers

    def _require_all_shards(self) -> None:
        missing = [shard for i, shard in enumerate(self.unit.shards) if i not in self.flats]
        if missing:
            names = ", ".join(slot.fqn for shard in missing for slot in shard.slots)
            raise UnsupportedGraph(
                f"set_reduce_scatter_unused_params(True): a graph reads none of {names}, which differ in dtype or "
                "requires_grad from what it reads of the unit, so it cannot gather what another rank may. Let it read "
                "one of them, make them a unit of their own, or leave the module uncompiled (torch.compiler.disable)."
            )

    def _reduce_zeros(self, call: str, slot: SlotIndex) -> None:
        shard, flat = self.unit.shards[slot[0]], self.flats[slot[0]]
        zeros, key, where = self._zeros(call, slot), str(MarkerKey(self.key, slot[0], call)), flat.meta["val"].device
        device = () if zeros.meta["val"].device == where else (where,)
        arguments = zeros, key, slot[1], shard.numel, shard.dtype, *device
        marker = self._insert(ops.REDUCE_GRAD, arguments, lambda: flat.meta["val"].new_empty(flat.meta["val"].shape))
        tags.tag_grad(zeros, self.ctx.plan.parameter_name(self.key, *slot))
        for node in (zeros, marker):
            node.meta["partitioner_tag"] = "must_be_in_backward"  # they need nothing that only backward has
        self._give(marker, flat)
        self.given[slot] = marker

    def _zeros(self, call: str, slot: SlotIndex) -> fx.Node:
        shape, dtype = list(self.unit.slot(slot).shape), self.unit.unsharded_dtype_of(slot)
        other = next(iter(self.reads.values())).meta["val"]
        if self.unit.regathers:
            arguments: Any = [self._read(call, each) for each in self.slots], self.slots.index(slot)
            return self._insert(ops.ZERO_GRADIENT, arguments, lambda: other.new_empty(shape, dtype=dtype))
        kind = {"dtype": dtype, "device": other.device, "pin_memory": False}
        return self._insert(
            torch.ops.aten.full.default, (shape, 0), lambda: other.new_empty(shape, dtype=dtype), **kind
        )

    def _read(self, call: str, slot: SlotIndex) -> fx.Node:
        if (call, slot) not in self.reads:
            other = next(iter(self.reads.values()))
            shape, dtype = list(self.unit.slot(slot).shape), self.unit.unsharded_dtype_of(slot)
            key, device = str(MarkerKey(self.key, slot[0], call)), other.args[5:]  # if the flat is on another one
            arguments = self.flats[slot[0]], key, slot[1], shape, dtype, *device
            made = self._insert(ops.UNSHARD, arguments, lambda: other.meta["val"].new_empty(shape, dtype=dtype))
            tags.tag(made, param=self.ctx.plan.parameter_name(self.key, *slot))
            self.reads[call, slot] = made
        return self.reads[call, slot]

    def _give(self, marker: fx.Node, flat: fx.Node) -> None:
        results, mine = signature.results_of(self.graph), ops.key_of(marker)[:2]
        found = (i for i, r in enumerate(results) if any(ops.key_of(m)[:2] == mine for m in ops.reduce_markers(r)))
        at = next(found, (self.ctx.num_results or 0) + self.graph.find_nodes(op="placeholder").index(flat))
        if isinstance(before := results[at], fx.Node):
            with self.graph.inserting_before(self.graph.output_node()):
                results[at] = total = self.graph.call_function(torch.ops.aten.add.Tensor, (before, marker))
            total.meta["val"] = before.meta["val"]
        else:
            results[at] = marker
        self.graph.output_node().args = (tuple(results),)

    def _insert(
        self, target: torch._ops.OpOverload, arguments: tuple[Any, ...], value: Callable[[], Tensor], **keywords: Any
    ) -> fx.Node:
        mode = torch_private.fake_mode_of(self.graph)
        assert mode is not None, "a graph with parameters has tensors"
        with self.graph.inserting_before(self.anchor), mode:
            made = self.graph.call_function(target, arguments, keywords)
            made.meta["val"] = value()
        return made


def _slot(marker: fx.Node) -> SlotIndex:
    return ops.key_of(marker).shard, ops.slot_of(marker)
