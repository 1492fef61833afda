"""Copy the shards of offloaded units to the device, and their gradients to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import GraphModule

from fxshard import torch_private
from fxshard.ir import collectives, graph_edit, ops, signature, tags
from fxshard.ir.plan import Offload
from fxshard.ir.tags import ShardKey
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class OffloadShards(GraphPass):
    """Read what is on the host through a copy on the device, and return a copy on the host of its gradient.

    Before   %w = unshard(%shard, 'blocks.0', 0)
             return reduce_grad(%dw, 'blocks.0', 0)
    After    %c = copy_to_device(%shard)  %s = wait(%c)  %w = unshard(%s, 'blocks.0', 0)
             %g = reduce_grad(%dw, 'blocks.0', 0)  %h = copy_to_host(%g)  return wait(%h)

    A shard is copied once for each call of its unit. It comes before the collectives, so that these are of what is on
    the device, whichever way launches are merged and cut later; see [Note: offloaded shards].

    Numerics: unchanged. Memory: the shard on the device until it was gathered, its gradient until it was copied.
    No-op: no unit is offloaded.
    Source: FSDP2 `_fsdp_param.py` (`all_gather_inputs`), `_fsdp_collectives.py` (`foreach_reduce`); ZeRO-Offload
        (arXiv:2101.06840).
    """

    requires = frozenset({Property.DEDUPED})

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        offloaded = {key: unit.offload for key, unit in ctx.plan.units.items() if unit.offload is not None}
        reads: dict[tuple[ShardKey, str], list[fx.Node]] = {}
        for marker in filter(ops.is_unshard, gm.graph.nodes):
            key = ops.key_of(marker)
            if key.unit in offloaded and ops.copy_to_device_behind(marker.args[0]) is None:
                reads.setdefault((ShardKey(key.unit, key.shard), key.call), []).append(marker)
        for (shard, call), markers in reads.items():
            _read_on_device(shard, call, markers, offloaded[shard.unit], ctx)
        results, on_host = signature.results_of(gm.graph), dict[int, fx.Node]()
        for i, result in enumerate(results):
            marker = next(iter(ops.reduce_markers(result)), None)
            to = offloaded.get(ops.key_of(marker).unit) if marker is not None else None
            if marker is not None and to is not None and ops.copy_to_host_behind(result) is None:
                on_host[i] = _return_on_host(result, marker, to, ctx)
        if on_host:
            gm.graph.output_node().args = (tuple(on_host.get(i, result) for i, result in enumerate(results)),)
        return bool(reads or on_host)


def _read_on_device(shard: ShardKey, call: str, markers: Sequence[fx.Node], to: Offload, ctx: PassContext) -> None:
    """Let the markers of one call read a copy of their shard, made where the first of them stands."""
    flat, graph = markers[0].args[0], markers[0].graph
    with graph.inserting_before(markers[0]):
        copy = _call(graph, ops.COPY_TO_DEVICE, flat, to.device, tags.TO_DEVICE)
        wait = _wait(copy)
    for marker in markers:
        marker.update_arg(0, wait)
    tags.tag(wait, shard=shard)
    _name(shard.unit, call, ctx, copy, tags.TO_DEVICE, wait, "on_device")


def _return_on_host(gradient: Any, marker: fx.Node, to: Offload, ctx: PassContext) -> fx.Node:
    """Copy the gradient of a shard to the host, and return what has waited for it."""
    graph, key = marker.graph, ops.key_of(marker)
    with graph.inserting_before(graph.output_node()):
        copy = _call(graph, ops.COPY_TO_HOST, gradient, to.pinned, tags.TO_HOST)
        wait = _wait(copy)
    _name(key.unit, key.call, ctx, copy, tags.TO_HOST, wait, "on_host")
    return wait


def _wait(copy: fx.Node) -> fx.Node:
    made = copy.graph.call_function(collectives.WAIT, (copy,))
    made.meta["val"] = copy.meta["val"]
    return made


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    made = graph.call_function(target, args)
    mode = torch_private.fake_mode_of(graph)
    assert mode is not None, "a graph with parameters has tensors"
    with mode:
        made.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
    return made


def _name(unit: str, call: str, ctx: PassContext, copy: fx.Node, stream: str, wait: fx.Node, prefix: str) -> None:
    taken = {node.name for node in copy.graph.nodes}
    suffix = ctx.plan.units[unit].node_name + ("" if call == "0" else f"_call{call}")
    tags.tag(copy, stream=stream)
    for node, name in ((copy, f"{stream}_{suffix}"), (wait, f"{prefix}_{suffix}")):
        tags.tag_units(node, {unit: call})
        graph_edit.rename(node, name, taken)
