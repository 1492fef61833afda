"""Leave gradients in their accumulators until the last microbatch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from fxshard.ir import graph_edit, launch_groups, ops, signature
from fxshard.ir.collectives import SlotIndex, UnitSlot
from fxshard.ir.graph_edit import Splicer
from fxshard.ir.variant import PLAIN, Variant, accumulator_dtype, in_order
from fxshard.passes._base import GraphPass, PassContext, Property

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class AccumulateGradients(GraphPass):
    """Give the graph an accumulator for each gradient; add the gradient to it, or it to the gradient.

    Before   %r = reduce_grad(%dw, 'blocks.0', 0)                                return %r
    After    %acc = input   %sum = add(%acc, %dw)   copy_(%acc, %sum)            return None
    or       %acc = input   %s = reduce_grad(%acc, ...)   %t = add(%r, %s)       return %t

    `which` says which units accumulate and which finish. What is reduced in the end is what FSDP2 would reduce:
    gradients of one microbatch are added up first, as autograd does, then added to those of earlier microbatches and
    rounded to the reduce dtype. Of a unit that is called several times FSDP2 reduces the two separately; then the
    backend does so too, and runs the plain backward afterwards (`compile/fsdp2_order.py`).

    Numerics: equal to FSDP2's `set_requires_gradient_sync(False)`, operation for operation.
    Memory: nothing of its own; accumulators take one unsharded gradient in reduce dtype. No-op: the plain variant.
    Limits: run by the backend for backwards of a step with several microbatches, not by a pipeline.
    Source: fairscale (the gradient concat in the last microbatch alone); FSDP2 `_fsdp_param.py`
        (`accumulate_unsharded_grad_if_needed`).
    """

    requires = frozenset({Property.DEDUPED})
    changes_signature = True

    which: Variant = PLAIN

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        terms = _terms(gm.graph)
        trained: dict[str, list[SlotIndex]] = {}
        for unit, slot in terms:
            trained.setdefault(unit, []).append(slot)
        wanted = in_order(self.which.units, trained)
        accumulators = {place: _add_input(gm.graph, place, ctx) for place in wanted}
        splicer = Splicer(gm.graph, ctx.decompositions, ctx.traced)
        for place, accumulator in accumulators.items():
            if place[0] in self.which.accumulates:
                _accumulate(splicer, accumulator, [marker.args[0] for marker in terms[place]])
            else:
                _finish(gm.graph, accumulator, terms[place][0])
        _return_nothing(gm.graph, self.which.accumulates)
        if accumulators:
            gm.graph.eliminate_dead_code()
        return bool(accumulators)


def _terms(graph: fx.Graph) -> dict[UnitSlot, list[fx.Node]]:
    """Map parameter -> the markers whose sum is its gradient, in the order in which autograd added them."""
    terms: dict[UnitSlot, list[fx.Node]] = {}
    for result in signature.results_of(graph):
        for marker in ops.reduce_markers(result):
            key = ops.key_of(marker)
            terms.setdefault((key.unit, (key.shard, ops.slot_of(marker))), []).append(marker)
    return terms


def _add_input(graph: fx.Graph, place: UnitSlot, ctx: PassContext) -> fx.Node:
    key, (i, _) = place
    unit = ctx.plan.units[key]
    dtype = accumulator_dtype(unit, unit.shards[i])
    return graph_edit.add_parameter(graph, ctx.plan, place, "acc", dtype)


def _accumulate(splicer: Splicer, accumulator: fx.Node, grads: Sequence[object]) -> None:
    """Add the sum of `grads` to the accumulator, after the last of them."""
    inputs = [accumulator, *(grad for grad in grads if isinstance(grad, fx.Node))]

    def add(old: Tensor, *terms: Tensor) -> Sequence[Tensor]:
        grad = functools.reduce(operator.add, terms)
        dtype = torch.promote_types(old.dtype, grad.dtype)  # rounded once, as `old += grad` is
        return [(old.to(dtype) + grad.to(dtype)).to(old.dtype)]

    place = launch_groups.following(max(inputs))  # nodes compare by their place in the graph
    (total,), _ = splicer.insert(place, add, inputs, ("accumulate", len(inputs)))
    with splicer.graph.inserting_after(total):
        written = splicer.graph.call_function(aten.copy_.default, (accumulator, total))
    written.meta["val"] = accumulator.meta["val"]


def _finish(graph: fx.Graph, accumulator: fx.Node, marker: fx.Node) -> None:
    """Let the accumulator be one more gradient of the parameter that `marker` reduces, the last to be added."""
    results = signature.results_of(graph)
    at = next(i for i, result in enumerate(results) if marker in ops.reduce_markers(result))
    before = results[at]
    assert isinstance(before, fx.Node)
    with graph.inserting_before(graph.output_node()):
        one_more = graph.call_function(ops.REDUCE_GRAD, (accumulator, *marker.args[1:]))
        total = graph.call_function(aten.add.Tensor, (before, one_more))
    one_more.meta["val"], total.meta["val"] = marker.meta["val"], before.meta["val"]
    results[at] = total
    graph.output_node().args = (tuple(results),)


def _return_nothing(graph: fx.Graph, units: frozenset[str]) -> None:
    """Let the graph have no gradient of these units, and Inductor expect none."""
    results, output = signature.results_of(graph), graph.output_node()
    for i, result in enumerate(results):
        markers = ops.reduce_markers(result)
        if markers and ops.key_of(markers[0]).unit in units:
            results[i] = None
    output.args = (tuple(results),)
    if (visible := output.meta.get("user_visible_output_idxs")) is not None:  # whose strides the caller sees
        output.meta["user_visible_output_idxs"] = [i for i in visible if results[i] is not None]
