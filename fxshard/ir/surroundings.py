"""What the rest of Dynamo's graph says of a part of it: whether that may be cut out."""

from __future__ import annotations

import functools
import inspect
import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

from fxshard import torch_private

_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_WRITES = frozenset(("setitem", "__setitem__", *(f"i{o}" for o in _OPERATORS), *(f"__i{o}__" for o in _OPERATORS)))

_STATELESS = (torch_private.LOG_USAGE, operator.setitem)
"""What gives no tensor and changes no state of torch's."""


class Surroundings:
    """What the rest of a graph says of a part of it."""

    def __init__(self, graph: fx.Graph) -> None:
        calls = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
        self.decided_by, self.matter = _deciding(graph), _leading_to_a_loss(graph)
        self._writes: dict[int, set[fx.Node]] = defaultdict(set)
        for node in calls:
            for value in (value for source in _written_by(node) for value in _tensors(source)):
                self._writes[torch_private.storage_id(value)].add(node)

    def writes_to(self, node: fx.Node, inside: list[fx.Node]) -> bool:
        """Return whether other nodes than these write to the memory of a node."""
        return any(self._writes[torch_private.storage_id(value)] - set(inside) for value in _tensors(node))


def _written_by(node: fx.Node) -> list[fx.Node]:
    """Return what a node of Dynamo's graph may write to, of what it is given, as far as names and arguments say."""
    if isinstance(node.target, OpOverload):
        return node.all_input_nodes if node.target._schema.is_mutable else []
    if isinstance(node.target, OpOverloadPacket):
        overloads = [getattr(node.target, name) for name in node.target.overloads()]
        return node.all_input_nodes if any(each._schema.is_mutable for each in overloads) else []
    name = torch_private.target_text(node).rpartition(".")[2]
    by_name = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
    by_argument = node.kwargs.get("out") is not None or node.kwargs.get("inplace")
    if by_name or by_argument or not torch_private.is_of_torch(node):
        return node.all_input_nodes
    given = dict(zip(_argument_names(node.target), node.args, strict=False)) | node.kwargs
    written = ["running_mean", "running_var"]  # of a norm over the batch
    if given.get("max_norm") is not None:  # of an embedding
        written.append("weight")
    return [value for value in map(given.get, written) if isinstance(value, fx.Node)]


@functools.cache
def _argument_names(target: Any) -> list[str]:
    try:
        return list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a function of C++ or the name of a method
        name = getattr(target, "__name__", target)
        packet = getattr(torch.ops.aten, name, None) if isinstance(name, str) else None
        default = getattr(packet, "default", None)
        return [argument.name for argument in default._schema.arguments] if default is not None else []


def _deciding(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map node -> the first change of torch's state (autocast, a kernel for attention) that is in force, if any is."""
    found: dict[fx.Node, fx.Node] = {}
    in_force: dict[object, fx.Node] = {}
    for node in graph.nodes:
        if in_force:
            found[node] = next(iter(in_force.values()))
        is_call = node.op in ("call_function", "call_method")
        if not is_call or node.target in _STATELESS or leaves(node.meta.get("example_value"), Tensor):
            continue
        if node.target is torch_private.EXIT_AUTOCAST:
            in_force.pop(node.args[0], None)
        elif node.target is not torch_private.SET_GRAD_ENABLED:
            in_force[node] = node
        elif node.args[0] == torch.is_grad_enabled():  # as where the graph begins
            in_force.pop(torch_private.SET_GRAD_ENABLED, None)
        else:
            in_force.setdefault(torch_private.SET_GRAD_ENABLED, node)
    return found


def _leading_to_a_loss(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that backward gives a gradient: a region's backward takes one for each differentiable result."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        leads = node.op == "output" or any(user in found for user in node.users)
        if leads and (node.op == "output" or requires_grad(node.meta.get("example_value"))):
            found.add(node)
    return found


def requires_grad(value: Any) -> bool:
    """Return whether a value is a tensor that backward reaches, or holds one."""
    return any(leaf.requires_grad for leaf in leaves(value, Tensor))


def leaves(value: Any, of: type = object) -> list[Any]:
    """Return what lists and tuples hold, at any depth, of a type."""
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in leaves(each, of)]
    return [value] if isinstance(value, of) else []


def _tensors(node: fx.Node) -> list[Tensor]:
    return leaves(node.meta.get("example_value"), Tensor)
