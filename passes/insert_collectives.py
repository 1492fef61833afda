"""Replace the markers by collectives on whole units."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from fxshard.errors import UnsupportedGraph
from fxshard.ir import collectives, ops, tags, text
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.ops import MarkerKey
from fxshard.ir.plan import UnitPlan
from fxshard.ir.splice import rename, splice
from fxshard.passes._base import Fact, GraphPass, PassContext


@dataclass(frozen=True, kw_only=True)
class InsertCollectives(GraphPass):
    """Gather each unit with one launch where it is first read, reduce its gradients with one launch after the last.

    Before   %w = unshard(%shard, 'blocks.0', 0)   %b = unshard(%shard, 'blocks.0', 1)   addmm(%b, %x, %w)
             %r = reduce_grad(%dw, 'blocks.0', 0)  %s = reduce_grad(%db, 'blocks.0', 1)  return add(%r, %s)
    After    %unshard_blocks_0 = all_gather(%shard)  %wait_blocks_0 = wait(...)  slices of it -> addmm
             cat of %dw, %db  %reduce_blocks_0 = reduce_scatter(...)  %wait = wait(...)  return %wait

    The launch reads the shard itself (or its one cast), so nothing is copied in. Gradients that several reads of one
    parameter produced are added before the reduction, in the order in which autograd would add them.

    Numerics: equal to FSDP2's, operation for operation: same buffer order, reduce dtype and division rule.
    Memory: the gathered buffer lives until its last parameter is copied out of it, the parameters until their last use.
    No-op: a graph without markers.
    Limits: a gradient of a shard that is anything but a sum of reductions is declined with `UnsupportedGraph`.
    Source: FSDP2 `_fsdp_collectives.py` (`foreach_all_gather`, `foreach_reduce`).
    """

    requires = frozenset({Fact.DEDUPED})
    ensures = frozenset({Fact.COLLECTIVES})

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
        reads, writes = _reads(gm.graph, ctx), _writes(gm.graph, ctx)
        for unit, markers in reads:
            _gather(unit, markers, ctx)
        for unit, grads in writes:
            _reduce(unit, grads, ctx)
        if writes:
            gm.graph.eliminate_dead_code()  # the markers themselves, which nothing reads any more
        _refuse_leftovers(gm, ctx)
        return bool(reads or writes)


def _reads(graph: fx.Graph, ctx: PassContext) -> list[tuple[UnitPlan, list[fx.Node]]]:
    """The markers of each call of each unit, in program order."""
    calls: dict[tuple[str, str], list[fx.Node]] = {}
    for node in graph.nodes:
        if ops.is_unshard(node):
            key = ops.key_of(node)
            calls.setdefault((key.unit, key.call), []).append(node)
    return [(ctx.plan.units[unit], markers) for (unit, _), markers in calls.items()]


def _gather(unit: UnitPlan, markers: list[fx.Node], ctx: PassContext) -> None:
    """Replace the markers of one call of a unit by one launch, before the first of them."""
    reads = [(ops.key_of(m).shard, ops.slot_of(m)) for m in markers]
    shards = {shard: m.args[0] for (shard, _), m in zip(reads, markers, strict=True)}
    inputs = [node for _, node in sorted(shards.items()) if isinstance(node, fx.Node)]

    def gather(*flat: Tensor) -> Sequence[Tensor]:
        return collectives.unshard(flat, unit, reads)

    parameters, created = splice(markers[0], gather, inputs, ctx.decompositions)
    key = ops.key_of(markers[0])
    suffix = "" if key.call == "0" else f"_call{key.call}"
    _name_collectives(created, f"unshard_{unit.node_name}{suffix}", f"wait_{unit.node_name}{suffix}", key)
    for marker, (shard, slot), parameter in zip(markers, reads, parameters, strict=True):
        tags.tag(parameter, tags.PARAM, ctx.plan.parameter_name(key.unit, shard, slot))
        if parameter in created:
            rename(parameter, unit.shards[shard].slots[slot].fqn.replace(".", "_") + suffix)
        marker.replace_all_uses_with(parameter)
        marker.graph.erase_node(marker)


@dataclass
class _UnitWrites:
    """The gradients of one unit in a backward graph.

    Attributes:
        key: of one of its markers.
        grads: for each parameter the unsharded gradients to add up, in order.
        outputs: shard index -> position among the graph's outputs.
    """

    key: MarkerKey
    grads: dict[SlotIndex, list[fx.Node]] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)


def _writes(graph: fx.Graph, ctx: PassContext) -> list[tuple[UnitPlan, _UnitWrites]]:
    """The gradients of each unit, found from the graph's outputs."""
    units: dict[str, _UnitWrites] = {}
    for position, result in enumerate(_results(graph)):
        for marker in ops.reduce_markers(result):
            key, grad = ops.key_of(marker), marker.args[0]
            assert isinstance(grad, fx.Node)
            writes = units.setdefault(key.unit, _UnitWrites(key))
            writes.grads.setdefault((key.shard, ops.slot_of(marker)), []).append(grad)
            writes.outputs[key.shard] = position
    return [(ctx.plan.units[unit], writes) for unit, writes in units.items()]


def _results(graph: fx.Graph) -> Sequence[fx.node.Argument]:
    (results,) = graph.output_node().args
    return results if isinstance(results, list | tuple) else (results,)


def _reduce(unit: UnitPlan, writes: _UnitWrites, ctx: PassContext) -> None:
    """Reduce a unit with one launch per reduce dtype, right after its last gradient."""
    slots = sorted(writes.grads)
    inputs = [grad for slot in slots for grad in writes.grads[slot]]
    counts = [len(writes.grads[slot]) for slot in slots]

    def reduce(*grads: Tensor) -> Sequence[Tensor]:
        terms = iter(grads)
        totals = [functools.reduce(torch.add, [next(terms) for _ in range(n)]) for n in counts]
        reduced = collectives.reduce_grads(totals, unit, slots)
        return [reduced[shard] for shard in sorted(writes.outputs)]

    graph = inputs[0].graph
    results, created = splice(_after_all(inputs), reduce, inputs, ctx.decompositions)
    _name_collectives(created, f"reduce_{unit.node_name}", f"reduced_{unit.node_name}", writes.key)
    outputs = list(_results(graph))
    for shard, result in zip(sorted(writes.outputs), results, strict=True):
        outputs[writes.outputs[shard]] = result
    graph.output_node().args = (tuple(outputs),)


def _after_all(nodes: Sequence[fx.Node]) -> fx.Node:
    """The first node that comes after all of `nodes` and after the graph's inputs."""
    order = {node: i for i, node in enumerate(nodes[0].graph.nodes)}
    place = max(nodes, key=order.__getitem__).next
    while place.op == "placeholder":
        place = place.next
    return place


def _name_collectives(created: Sequence[fx.Node], launch: str, wait: str, key: MarkerKey) -> None:
    for node in created:
        is_wait = node.target is collectives.WAIT
        if is_wait or node.target in collectives.LAUNCHES:
            rename(node, wait if is_wait else launch)
            tags.tag(node, tags.UNIT, f"{key.unit}@{key.call}")


def _refuse_leftovers(gm: GraphModule, ctx: PassContext) -> None:
    """Decline a graph that still has a marker: in a subgraph, or in arithmetic on a shard's gradient."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if not (ops.is_unshard(node) or ops.is_reduce_grad(node)):
                continue
            key = ops.key_of(node)
            fqn = ctx.plan.units[key.unit].shards[key.shard].slots[ops.slot_of(node)].fqn
            if module is not gm:
                raise UnsupportedGraph(
                    f"{fqn} is read inside a subgraph (cond, while_loop, flex attention); parameters are gathered at "
                    "the top level only. Read it outside and pass it in, or leave the module uncompiled.\n"
                    f"{text.window(node)}"
                )
            raise UnsupportedGraph(
                f"{fqn}: its gradient is not a plain sum over its reads, so it cannot be reduced with its unit. Leave "
                f"the module that computes on it uncompiled (torch.compiler.disable).\n{text.window(node)}"
            )
