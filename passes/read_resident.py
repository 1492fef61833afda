"""Read parameters that are gathered already: inputs of the graph in place of gathers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import GraphModule

from fxshard import torch_private
from fxshard.ir import collectives, graph_edit, liveness, ops, signature
from fxshard.ir.collectives import SlotIndex, UnitSlot
from fxshard.ir.variant import PLAIN, Variant, in_order
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class ReadResident(GraphPass):
    """Give the graph an input for each parameter that it reads of a resident unit, and let it wait there.

    Before   %w = unshard(%shard, 'blocks.0', 0)   addmm(%b, %x, %w)
    After    %resident_w = input   %w = wait(%resident_w)   addmm(%b, %x, %w)

    `which` says which units are resident. The launch is outside of the graph: in the first microbatch that wants the
    parameters, before the graph begins. Its wait stays where the parameter is first read, so compute that does not need
    it goes ahead; in later microbatches there is nothing to wait for. All calls of the unit read the same input. A
    result of the graph that is a parameter, or a view of one, is copied: the user may write to what the model returns.
    So is one that was cast and cast back, for Inductor leaves such casts out.

    Numerics: unchanged; the parameters are those that the graph would have gathered.
    Memory: the parameters live throughout, and in between: the caller holds them.
    No-op: no unit is resident, or the graph reads none that is.
    Limits: run by the backend for steps of several microbatches, not by a pipeline.
    Source: FSDP2 `set_reshard_after_backward(False)`, which keeps the parameters that backward gathered.
    """

    requires = frozenset({Property.DEDUPED})
    changes_signature = True

    which: Variant = PLAIN

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        markers = _unshard_markers(gm.graph)
        read: dict[str, list[SlotIndex]] = {}
        for unit, slot in markers:
            read.setdefault(unit, []).append(slot)
        inputs = {parameter: _add_input(gm.graph, parameter, ctx) for parameter in in_order(self.which.resident, read)}
        taken = {node.name for node in gm.graph.nodes}
        for parameter, source in inputs.items():
            _wait_for_input(source, markers[parameter], taken)
        if inputs:
            num_results = ctx.num_results if ctx.kind == "forward" else None
            _copy_results_that_share_memory(gm.graph, frozenset(inputs.values()), num_results)
        return bool(inputs)


def _unshard_markers(graph: fx.Graph) -> dict[UnitSlot, list[fx.Node]]:
    markers: dict[UnitSlot, list[fx.Node]] = {}
    for node in graph.nodes:
        if ops.is_unshard(node):
            unit, shard, slot = ops.parameter_key_of(node)
            markers.setdefault((unit, (shard, slot)), []).append(node)
    return markers


def _add_input(graph: fx.Graph, parameter: UnitSlot, ctx: PassContext) -> fx.Node:
    dtype = ctx.plan.units[parameter[0]].unsharded_dtype_of(parameter[1])
    return graph_edit.add_parameter(graph, ctx.plan, parameter, "resident", dtype)


def _wait_for_input(source: fx.Node, markers: list[fx.Node], taken: set[str]) -> None:
    """Wait for an input where the first of `markers` stands, in place of all of them."""
    graph = source.graph
    with graph.inserting_before(markers[0]):
        parameter = graph.call_function(collectives.WAIT, (source,))
    parameter.meta["val"] = source.meta["val"]
    graph_edit.rename(parameter, source.name.removeprefix("resident_"), taken)
    for marker in markers:
        marker.replace_all_uses_with(parameter)
        graph.erase_node(marker)


def _copy_results_that_share_memory(graph: fx.Graph, inputs: frozenset[fx.Node], num_results: int | None) -> None:
    """Copy each result that lies in the memory of one of `inputs`; what is saved for backward may."""
    live, results = liveness.liveness(graph), signature.results_of(graph)
    mode = torch_private.fake_mode_of(graph)
    assert mode is not None, "a graph with parameters has tensors"
    copies: dict[Any, fx.Node] = {}
    for result in dict.fromkeys(node for node in results[:num_results] if isinstance(node, fx.Node)):
        if _may_share_memory(result, inputs, live):
            with graph.inserting_before(graph.output_node()):
                copies[result] = graph.call_function(ops.COPY, (result,))
            with mode:
                copies[result].meta["val"] = ops.COPY(result.meta["val"])
    results[:num_results] = [copies.get(result, result) for result in results[:num_results]]
    graph.output_node().args = (results,)


def _may_share_memory(result: fx.Node, inputs: frozenset[fx.Node], live: liveness.Liveness) -> bool:
    """Return whether a result lies in the memory of an input, or would if casts and copies between were left out."""
    makers = [live.storages[index].maker for index in live.storages_of[result]]
    while makers[:1] and makers[0].target in ops.COPIES | ops.CASTS:
        makers = [live.storages[index].maker for index in live.storages_of[makers[0].all_input_nodes[0]]]
    return any(maker in inputs for maker in makers)
