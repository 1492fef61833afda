"""What tests ask of single nodes: how they print, and what is alive while they run."""

from __future__ import annotations

from torch import fx

from fxshard.ir.liveness import hint_of, liveness
from fxshard.ir.text import window


def node_text(node: fx.Node) -> str:
    return window(node, lines=0).removeprefix("-> ")


def live_bytes(graph: fx.Graph, *, donated: bool = False) -> dict[fx.Node, int]:
    """For each node the bytes that are live while it runs; symbolic sizes count as their hints."""
    live = liveness(graph, donated=donated)
    sizes = [hint_of(storage.nbytes) for storage in live.storages]
    return {node: int(size) for node, size in zip(live.nodes, live.running_sum(sizes), strict=True)}
