"""Snapshots: what a graph was at one moment, cheap to take, and a graph again when somebody looks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

_KEPT_META = (
    "val",
    "example_value",
    "fxshard",
    "recompute",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "desc",
)

_OF_INPUT, _STATIC = "tensor_dict", "_dynamo_static_input_type"
"""What Dynamo keeps of an input's attributes, and of that, whether it is a parameter: the rest may hold a model."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """Stands in a node's arguments for the node with this number."""

    index: int


class Snapshot:
    """The nodes of `graph` as they are now, with their names; tags and fake values are shared, edits are not.

    Most graphs of a history are never looked at, and making one takes as long as a pass. So a snapshot keeps what nodes
    are made of, and none of the nodes: they would keep the graph alive, and the module that owns it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        references: dict[fx.Node, Any] = {node: _Reference(i) for i, node in enumerate(graph.nodes)}
        self._nodes: list[tuple[Any, ...]] = [
            (
                node.op,
                node.target,
                *fx.map_arg((node.args, node.kwargs), references.__getitem__),
                node.name,
                node.type,
                _kept_meta(node),
            )
            for node in references
        ]
        # The module is kept only for the subgraphs in it: a history that outlives the model must not hold its modules.
        self._module = graph.owning_module if graph.find_nodes(op="get_attr") else None

    @functools.cached_property
    def graph(self) -> fx.Graph:
        """The graph; the same object each time, to be read, not edited."""
        return self.copy()

    def copy(self) -> fx.Graph:
        """Return a graph that is the caller's to edit."""
        graph, made = fx.Graph(owning_module=self._module), list[fx.Node]()

        def node_of(argument: Any) -> Any:
            return made[argument.index] if isinstance(argument, _Reference) else argument

        for op, target, args, kwargs, name, type_expr, meta in self._nodes:
            args, kwargs = map_aggregate((args, kwargs), node_of)
            node = graph.create_node(op, target, args, kwargs, name=name, type_expr=type_expr)
            node.meta = dict(meta)
            made.append(node)
        return graph


def _kept_meta(node: fx.Node) -> dict[str, Any]:
    kept = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    if static := node.meta.get(_OF_INPUT, {}).get(_STATIC):
        kept[_OF_INPUT] = {_STATIC: static}
    return kept
