"""Replace the markers by collectives on whole units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.fx import GraphModule

from fxshard.errors import UnsupportedGraph
from fxshard.ir import collectives, ops, signature, text
from fxshard.ir.buckets import CollectiveBuilder, ReduceBucket, Reduced, UnitGather
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.memory_budget import require_fit
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class InsertCollectives(GraphPass):
    """Gather each unit with one launch where it is first read, reduce its gradients with one launch after the last.

    Before   %w = unshard(%shard, 'blocks.0', 0)   %b = unshard(%shard, 'blocks.0', 1)   addmm(%b, %x, %w)
             %r = reduce_grad(%dw, 'blocks.0', 0)  %s = reduce_grad(%db, 'blocks.0', 1)  return add(%r, %s)
    After    %unshard_blocks_0 = all_gather(%shard)  %wait_blocks_0 = wait(...)  slices of it -> addmm
             cat of %dw, %db  %reduce_blocks_0 = reduce_scatter(...)  %wait = wait(...)  return %wait

    The launch reads the shard itself (or its one cast), so nothing is copied in. Gradients of several reads of one
    parameter are added before the reduction, in the order in which autograd would add them.

    Where replicas hold the same shard (a mesh of two axes), what a reduction leaves is averaged over them by one
    all_reduce of the same tensors, and divided or cast after it.

    Numerics: equal to FSDP2's, operation for operation: same buffer order, reduce dtype and division rule.
    Memory: the gathered buffer lives until its last parameter is copied out of it, the parameters until their last use.
    No-op: a graph without markers.
    Limits: a gradient of a shard that is anything but a sum of reductions is declined with `UnsupportedGraph`.
    Source: FSDP2 `_fsdp_collectives.py` (`foreach_all_gather`, `foreach_reduce`).
    """

    requires = frozenset({Property.DEDUPED})
    ensures = frozenset({Property.COLLECTIVES})

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        builder = CollectiveBuilder(gm.graph, ctx.plan, ctx.decompositions, ctx.traced)
        gathers, writes = _gathers(gm.graph, ctx), _writes(gm.graph)
        for gather in gathers:
            builder.gather((gather,))
        for unit, written in writes.items():
            reduced: Reduced = {unit: {}}
            for reduction in _reductions(unit, written, ctx):
                reduced[unit] |= builder.reduce(reduction)[1][unit]
            builder.return_gradients(unit, written.outputs, reduced[unit])
        if writes:
            gm.graph.eliminate_dead_code()  # the markers themselves, which nothing reads any more
        builder.close()
        _refuse_leftovers(gm, ctx)
        if ctx.unsharded_budget_bytes is not None:
            require_fit(gm.graph, ctx.unsharded_budget_bytes)
        return bool(gathers or writes)


def _gathers(graph: fx.Graph, ctx: PassContext) -> list[UnitGather]:
    calls: dict[tuple[str, str], list[fx.Node]] = {}
    for node in graph.nodes:
        if ops.is_unshard(node):
            key = ops.key_of(node)
            calls.setdefault((key.unit, key.call), []).append(node)
    return [_gather(unit, call, markers, ctx) for (unit, call), markers in calls.items()]


def _gather(unit: str, call: str, markers: Sequence[fx.Node], ctx: PassContext) -> UnitGather:
    reads = {(ops.key_of(m).shard, ops.slot_of(m)): m for m in markers}
    flats = {shard: m.args[0] for (shard, _), m in reads.items()}
    segments = collectives.whole_shards(reads, ctx.plan.units[unit])
    found = {shard: flat for shard, flat in flats.items() if isinstance(flat, fx.Node)}
    return UnitGather(unit=unit, call=call, flats=found, segments=tuple(segments), reads=reads)


@dataclass
class _Written:
    """The gradients of one unit in a backward graph."""

    call: str  # of one of its markers
    grads: dict[SlotIndex, list[fx.Node]] = field(default_factory=dict)  # the unsharded gradients to add up, in order
    outputs: dict[int, int] = field(default_factory=dict)  # shard index -> index among the graph's outputs


def _writes(graph: fx.Graph) -> dict[str, _Written]:
    units: dict[str, _Written] = {}
    for position, result in enumerate(signature.results_of(graph)):
        for marker in ops.reduce_markers(result):
            key, grad = ops.key_of(marker), marker.args[0]
            assert isinstance(grad, fx.Node)
            written = units.setdefault(key.unit, _Written(key.call))
            written.grads.setdefault((key.shard, ops.slot_of(marker)), []).append(grad)
            written.outputs[key.shard] = position
    return units


def _reductions(unit: str, written: _Written, ctx: PassContext) -> list[ReduceBucket]:
    grads = dict(sorted(written.grads.items()))
    dtypes = {slot: collectives.sum_dtype(nodes) for slot, nodes in grads.items()}
    groups = collectives.reduce_dtypes(dtypes, ctx.plan.units[unit])
    return [
        ReduceBucket(
            tensors=(tuple((unit, slot) for slot in slots),),
            terms={(unit, slot): grads[slot] for slot in slots},
            calls={unit: written.call},
            dtype=dtype,
        )
        for dtype, slots in groups.items()
    ]


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
