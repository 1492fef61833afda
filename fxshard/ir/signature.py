"""What a graph takes and gives: its inputs, its results, and the parameters to which it gives gradients."""

from __future__ import annotations

from torch import fx

from fxshard.ir import ops, text
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.tags import ShardKey


def inputs_of(graph: fx.Graph) -> tuple[str, ...]:
    """Return name and type of every input."""
    return tuple(f"{node.name}: {type_of(node)}" for node in graph.find_nodes(op="placeholder"))


def results_of(graph: fx.Graph) -> list[fx.node.Argument]:
    """Return what a graph returns, one by one."""
    (results,) = graph.output_node().args
    return list(results) if isinstance(results, list | tuple) else [results]


def type_of(value: fx.node.Argument) -> str:
    """Return the type of a node as the printer writes it; other values as they are."""
    return (text.type_text(value) or "untyped") if isinstance(value, fx.Node) else str(value)


def gradients_of(graph: fx.Graph) -> dict[int, ShardKey]:
    """Map index of a result -> the shard whose gradient it is, in a graph with markers."""
    markers = {i: ops.reduce_markers(result) for i, result in enumerate(results_of(graph))}
    return {i: ShardKey(ops.key_of(found[0]).unit, ops.key_of(found[0]).shard) for i, found in markers.items() if found}


def trained_by(graph: fx.Graph) -> dict[str, list[SlotIndex]]:
    """Map unit key -> the parameters that a joint graph gives a gradient, in the order of their first markers."""
    found: dict[str, dict[SlotIndex, None]] = {}
    for node in filter(ops.is_reduce_grad, graph.nodes):
        key = ops.key_of(node)
        found.setdefault(key.unit, {})[key.shard, ops.slot_of(node)] = None
    return {unit: list(slots) for unit, slots in found.items()}
