"""Trace ordinary torch code and put its nodes into a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.errors import InvariantError
from fxshard.ir import fake

Decompositions = Mapping[Any, Callable[..., Any]]


def splice(
    anchor: fx.Node,
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[fx.Node],
    decompositions: Decompositions,
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Insert the nodes of `function(*inputs)` before `anchor`.

    Args:
        anchor: node that all new nodes precede.
        function: plain torch code over tensors; may call collectives.
        inputs: nodes that come before `anchor`, each with a fake tensor as `meta["val"]`.
        decompositions: applied while tracing, so that the new nodes are of the same dialect as the graph.

    Returns:
        The nodes of the function's results (an input, where the function hands one back), and all new nodes.
    """
    graph = anchor.graph
    mode = fake.fake_mode_of(graph)
    if mode is None:
        raise InvariantError(f"graph of %{anchor.name} has no fake tensors: it was not traced by AOTAutograd.")
    with mode, torch.no_grad():
        values = [node.meta["val"].detach() for node in inputs]
        traced = make_fx(lambda *args: list(function(*args)), dict(decompositions))(*values)
    replaced: dict[fx.Node, fx.Node] = {}
    created: list[fx.Node] = []
    sources = iter(inputs)
    with graph.inserting_before(anchor):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                replaced[node] = next(sources)
            elif node.op == "output":
                return [replaced[result] for result in node.args[0]], created
            else:
                replaced[node] = graph.node_copy(node, lambda n: replaced[n])
                created.append(replaced[node])
    raise InvariantError("a traced graph had no output node.")


def rename(node: fx.Node, name: str, taken: set[str]) -> None:
    """Give `node` a name that says what it is, with a number where it is among `taken`; adds it there."""
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    node.name = candidate  # torch's own renaming would not give back the name of a node that was erased
    taken.add(candidate)
