"""What tests ask of single nodes: how they print, what is alive while they run, and which regions they call."""

from __future__ import annotations

from torch import fx

from fxshard.ir import ops
from fxshard.ir.liveness import hint_of, liveness
from fxshard.ir.text import window


def graph_of_inputs(*names: str) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    return graph, [graph.placeholder(name) for name in names]


def regions_called(graph: fx.Graph) -> list[str]:
    return [str(node.args[1]) for node in graph.find_nodes(op="call_function", target=ops.REGION)]


def node_text(node: fx.Node) -> str:
    return window(node, lines=0).removeprefix("-> ")


def live_bytes(graph: fx.Graph, *, donated: bool = False) -> dict[fx.Node, int]:
    """For each node the bytes that are live while it runs; symbolic sizes count as their hints."""
    live = liveness(graph, donated=donated)
    sizes = [hint_of(storage.nbytes) for storage in live.storages]
    return {node: int(size) for node, size in zip(live.nodes, live.running_sum(sizes), strict=True)}
