"""The schedule of a graph as text: what it launches, waits for and computes, in program order."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from fxshard.ir import collectives, launches, ops, tags


def schedule_text(graph: fx.Graph) -> str:
    """One short line per launch, wait, kernel and copy on a side stream, and which of these the graph returns.

    What is left out Inductor fuses into these or runs where it likes; `text.graph_text` has everything.
    """
    shown = [node for node in graph.nodes if _is_shown(node)]
    results = {user.name: node.name for node in shown for user in node.users if user.target is operator.getitem}
    returned = [node.name for node in graph.output_node().all_input_nodes if _is_shown(node)]
    return "\n".join([*(_line(node, results) for node in shown), f"return {', '.join(returned)}".rstrip()])


def _is_shown(node: fx.Node) -> bool:
    copies = bool(tags.meta_of(node).stream) and node.target not in (operator.getitem, *ops.VIEWS)
    return collectives.is_launch(node) or collectives.is_wait(node) or launches.is_kernel(node) or copies


def _line(node: fx.Node, results: Mapping[str, str]) -> str:
    """The name, the op if it is one of ours, and what else decides when it runs; `results` -> what they are of."""
    meta = tags.meta_of(node)
    said = {"after": meta.after, "control_deps": meta.control_deps, "stream": (meta.stream,) if meta.stream else ()}
    namespace, _, op = str(node.target).removesuffix(".default").partition(".")
    is_ours = namespace == "fxshard" and (collectives.is_launch(node) or collectives.is_wait(node))
    if is_ours and "role" in (given := collectives.arguments_of(node)):
        said["role"] = (given["role"],)
    comments = (f"  # {key}={','.join(results.get(name, name) for name in said[key])}" for key in said if said[key])
    return (f"{node.name} = {op}" if is_ours else node.name) + "".join(comments)
