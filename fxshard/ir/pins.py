"""Pins: which node must come after which, whatever Inductor fuses.

[Note: pins]
A node is *pinned* by a tag that names the nodes which it must come after. Until then graphs stay as they are to read,
verify and estimate. Right before Inductor lowers one, `passes/enforce_order.py` turns the tags into its `control_deps`,
a private op of torch around the node. `inlined` undoes it, so that such a graph is read and verified as any other.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx

from fxshard import torch_private
from fxshard.ir import tags


def pin(node: fx.Node, before: fx.Node) -> bool:
    """Say that `node` comes after `before`, unless it cannot but do so; return whether that is new."""
    tensor = _tensor_of(before)
    if tensor is None or node < tensor or {before, tensor} & set(node.all_input_nodes):
        return False
    known = tags.meta_of(node).after
    if tensor.name not in known:
        tags.tag(node, after=(*known, tensor.name))
    return tensor.name not in known


def _tensor_of(node: fx.Node) -> fx.Node | None:
    """Return the node, or one of several results: torch 2.11 takes nothing but a tensor."""
    if isinstance(node.meta.get("val"), Tensor):
        return node
    return next((user for user in node.users if user.target is operator.getitem), None)


def inlined(graph: fx.Graph) -> fx.Graph:
    """Return a copy with each node in place of the `control_deps` around it; a graph without any itself."""
    wrapped = set(graph.find_nodes(op="call_function", target=torch_private.CONTROL_DEPS))
    if not wrapped:
        return graph
    subgraphs = {node.args[1] for node in wrapped}
    copied, copies = fx.Graph(graph.owning_module), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in subgraphs:
            continue
        inner, inputs = torch_private.inside(node) if node in wrapped else (node, {})
        known = {placeholder: copies[source] for placeholder, source in inputs.items()} or copies
        copy = copies[node] = copied.node_copy(inner, known.__getitem__)
        copy.name, copy.meta = node.name, dict(node.meta)
        if node in wrapped:
            tags.tag(copy, after=(), control_deps=tuple(before.name for before in node.args[0]))
    return copied
