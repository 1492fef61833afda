"""Read parameters that are gathered already: inputs of the graph in place of gathers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from fxshard import torch_private
from fxshard.ir import collectives, graph_edit, liveness, ops, tags
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.variant import PLAIN, Variant, in_order
from fxshard.ir.verify import baseline
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class ReadResident(GraphPass):
    """Give the graph an input for each parameter that it reads of a resident unit, and let it wait there.

    Before   %w = unshard(%shard, 'blocks.0', 0)   addmm(%b, %x, %w)
    After    %resident_w = input   %w = wait(%resident_w)   addmm(%b, %x, %w)

    The launch is outside of the graph: in the first microbatch that wants the parameters, before the graph begins. Its
    wait stays where the parameter is first read, so compute that does not need it goes ahead; in later microbatches
    there is nothing to wait for. All calls of the unit read the same input. A result of the graph that is a parameter,
    or a view of one, is copied: the user may write to what the model returns. So is one that was cast to and fro, for
    Inductor leaves such casts out.

    Attributes:
        which: the units whose parameters come in.

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
        """Edit `gm.graph` in place; return whether anything changed."""
        markers: dict[tuple[str, SlotIndex], list[fx.Node]] = {}
        for node in gm.graph.nodes:
            if ops.is_unshard(node):
                unit, shard, slot = baseline.parameter_key_of(node)
                markers.setdefault((unit, (shard, slot)), []).append(node)
        read: dict[str, list[SlotIndex]] = {}
        for unit, index in markers:
            read.setdefault(unit, []).append(index)
        wanted = in_order(self.which.resident, read)
        added = {place: _add_input(gm.graph, place, ctx) for place in wanted}
        taken = {node.name for node in gm.graph.nodes}
        for place, source in added.items():
            _replace(markers[place], source, taken)
        if added:
            num_results = ctx.num_results if ctx.kind == "forward" else None
            _copy_results(gm.graph, frozenset(added.values()), num_results)
        return bool(added)


def _add_input(graph: fx.Graph, place: tuple[str, SlotIndex], ctx: PassContext) -> fx.Node:
    key, (i, _) = place
    unit = ctx.plan.units[key]
    return graph_edit.add_parameter(graph, ctx.plan, place, tags.RESIDENT, unit.unsharded_dtype(unit.shards[i]))


def _replace(markers: list[fx.Node], source: fx.Node, taken: set[str]) -> None:
    """Wait for an input where the first of `markers` stands, in place of all of them."""
    graph = source.graph
    with graph.inserting_before(markers[0]):
        parameter = graph.call_function(collectives.WAIT, (source,))
    parameter.meta["val"] = source.meta["val"]
    graph_edit.rename(parameter, source.name.removeprefix(f"{tags.RESIDENT}_"), taken)
    for marker in markers:
        marker.replace_all_uses_with(parameter)
        graph.erase_node(marker)


def _may_be_one(result: fx.Node, residents: frozenset[fx.Node], live: liveness.Liveness) -> bool:
    """Whether a result lies in the memory of an input, or would if casts and copies between were left out."""
    makers = [live.storages[index].maker for index in live.storages_of[result]]
    while makers[:1] and makers[0].target in ops.COPIES | ops.CASTS:
        makers = [live.storages[index].maker for index in live.storages_of[makers[0].all_input_nodes[0]]]
    return any(maker in residents for maker in makers)


def _copy_results(graph: fx.Graph, residents: frozenset[fx.Node], num_results: int | None) -> None:
    """Copy each result that lies in the memory of one of `residents`; what is saved for backward may."""
    live = liveness.liveness(graph)
    (output,) = graph.find_nodes(op="output")
    results = baseline.results_of(graph)
    for result in dict.fromkeys(node for node in results[:num_results] if isinstance(node, fx.Node)):
        if not _may_be_one(result, residents, live):
            continue
        with graph.inserting_before(output):
            copy = graph.call_function(ops.COPY, (result,))
        mode = torch_private.fake_mode_of(graph)
        assert mode is not None, "a graph with parameters has tensors"
        with mode:
            copy.meta["val"] = ops.COPY(result.meta["val"])
        results[:num_results] = [copy if node is result else node for node in results[:num_results]]
    output.args = (results,)
