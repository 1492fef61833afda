"""The order of collectives in a graph: what all ranks must have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxshard.ir import tags, text

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
_SHORT = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
}


class Launch(NamedTuple):
    """One collective of a graph.

    Attributes:
        group: name of its process group.
        text: all that the ranks of the group must agree on: `all_gather f32[20 -> 40] on group '0' for layers.0`.
        name: of the node.
        kind: what is launched: `all_gather`.
        serves: the units that it is for: `layers.0, layers.1`; empty for the user's own collectives.
    """

    group: str
    text: str
    name: str
    kind: str = ""
    serves: str = ""


def sequence(graph: fx.Graph) -> tuple[Launch, ...]:
    """The collectives that a run of `graph` launches, in order; those of the user's code included."""
    return tuple(_launch(node) for node in graph.nodes if _is_launch(node))


def _is_launch(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace in _NAMESPACES and target._opname != "wait_tensor"


def _launch(node: fx.Node) -> Launch:
    target: Any = node.target
    given = dict(zip((argument.name for argument in target._schema.arguments), node.args, strict=False)) | node.kwargs
    group = str(given.pop("group_name"))
    words = [_SHORT.get(target._opname, target._opname), *(value for value in given.values() if isinstance(value, str))]
    # How much a rank sends to each other one is its own affair.
    sizes = _sizes(given, node.meta.get("val")) if "all_to_all" not in target._opname else "[?]"
    units = ", ".join(unit or "root" for unit in tags.units_of(node))
    serves = f" for {units}" if units else ""  # else two units of one shape could swap places on one rank
    return Launch(group, f"{' '.join(words)} {sizes} on group {group!r}{serves}", f"%{node.name}", words[0], units)


def _sizes(given: dict[str, Any], outputs: Any) -> str:
    """`f32[20 -> 40]` per tensor: the elements that go in and come out."""
    inputs = [n.meta.get("val") for value in given.values() for n in _flat(value) if isinstance(n, fx.Node)]
    pairs = zip(inputs, _flat(outputs), strict=False)
    return ", ".join(f"{_dtype(i)}[{_numel(i)} -> {_numel(o)}]" for i, o in pairs)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _dtype(value: Any) -> str:
    return text.dtype_text(value.dtype) if isinstance(value, Tensor) else "?"


def _numel(value: Any) -> str:
    """The number, or a question mark where it is symbolic: names of symbols differ between ranks."""
    numel = value.numel() if isinstance(value, Tensor) else None
    return str(numel) if isinstance(numel, int) else "?"
