"""The collectives that a graph launches, as all ranks must agree on them, and which other nodes are kernels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from fxshard.ir import collectives, ops, regions, tags, text
from fxshard.ir.plan import BY, EXCHANGING

_MORE_KERNELS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward,
    torch.ops.fxshard.addmm_acc,
)
"""Kernels that torch's table of FLOPs leaves out."""

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_NOT_COMPARED = ("group_name", "role", "stream")
"""Arguments in words that do not change what the other ranks see."""


class Launch(NamedTuple):
    """One collective of a graph."""

    group: str  # name of the process group
    text: str  # all that ranks must agree on: `all_gather f32[20 -> 40] on group '0' for layers.0`
    name: str  # of the node
    kind: str = ""  # such as `all_gather`
    serves: str = ""  # the units: `layers.0, layers.1`; empty for the user's own collectives

    @property
    def on_any_group(self) -> Launch:
        """The same without the name of its group, which is another one for each replica; with that of its object."""
        _, by, comm = self.group.partition(BY)
        text = self.text.replace(on_group(self.group), by + comm.partition(" ")[0])
        return self._replace(text=text)

    def renamed(self, names: Mapping[str, str]) -> Launch:
        """Return the same for units of other `names`: blocks that are compiled one by one share a graph."""
        units = ", ".join(names.get(unit, unit) for unit in self.serves.split(", "))
        return self._replace(text=self.text.removesuffix(self.serves) + units, serves=units)


def on_group(name: str) -> str:
    """Say on which process group, and by what type of object; ranks count objects of a type for themselves."""
    shared, by, comm = name.removesuffix(EXCHANGING).partition(BY)
    return f" on group {shared + by + comm.partition(' ')[0]!r}"


def sequence(graph: fx.Graph, parts: Mapping[fx.Node, str] = MappingProxyType({})) -> tuple[Launch, ...]:
    """Return the collectives that a run launches, in order; `parts` says which parameters launches of ours move."""
    found: list[Launch] = []
    for node in graph.nodes:
        if collectives.is_launch(node):
            found.append(_launch(node, parts.get(node, "")))
        elif (code := regions.code_of(node)) is not None:
            found += (inner._replace(name=f"%{node.name}/{inner.name[1:]}") for inner in sequence(code.graph))
    return tuple(found)


def is_models_own(node: fx.Node) -> bool:
    """Return whether a node launches collectives that are no unit's: it is one, or calls a region with some."""
    if (code := regions.code_of(node)) is not None:
        return any(map(is_models_own, code.graph.nodes))
    return collectives.is_launch(node) and not tags.units_of(node)


def kind_of(launch: fx.Node) -> str:
    """Return what is launched, in short: `all_gather`, `reduce_scatter`, `all_reduce`."""
    name = str(getattr(launch.target, "_opname", ""))
    return next((kind for kind in _KINDS if kind in name), name.rstrip("_"))


def is_kernel(node: fx.Node) -> bool:
    """Return whether a node is a kernel of its own, which Inductor fuses with nothing that comes before it."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet in flop_registry or packet in _MORE_KERNELS


def is_read_by_a_library(parameter: fx.Node) -> bool:
    """Return whether anything but generated kernels reads a tensor as it is: a kernel of a library, or the caller."""
    return any(
        is_kernel(user)
        or user.op == "output"
        or (user.target in ops.MOVEMENT - ops.CASTS and is_read_by_a_library(user))
        or any(map(is_read_by_a_library, _inside(user, parameter)))
        for user in parameter.users
    )


def _inside(call: fx.Node, operand: fx.Node) -> list[fx.Node]:
    """Return what stands for an operand in the region that a node calls."""
    code = regions.code_of(call)
    if code is None:
        return []
    given = zip(code.graph.find_nodes(op="placeholder"), regions.operands_of(call), strict=True)
    return [place for place, node in given if node is operand]


def _launch(node: fx.Node, part: str) -> Launch:
    given, kind, group = collectives.arguments_of(node), kind_of(node), collectives.group_of(node)
    words = [kind, *(v for name, v in given.items() if isinstance(v, str) and name not in _NOT_COMPARED)]
    units = ", ".join(unit or "root" for unit in tags.units_of(node))
    serves = f" for {units}" if units else ""  # else two units of one shape could swap places on one rank
    sent = _sizes(node, given) + (f" of {part}" if part else "")
    return Launch(group, f"{' '.join(words)} {sent}{on_group(group)}{serves}", f"%{node.name}", kind, units)


def _sizes(launch: fx.Node, given: Mapping[str, Any]) -> str:
    if "all_to_all" in str(launch.target):
        return "[?]"  # how much a rank sends to each other one is its own affair
    results = _flat(launch.meta.get("val"))
    if launch.target in collectives.LAUNCHES:
        sizes = [(_dtype(t), _sent(launch, t), _numel(t)) for t in results]
    else:
        inputs = [n.meta.get("val") for value in given.values() for n in _flat(value) if isinstance(n, fx.Node)]
        sizes = [(_dtype(i), _numel(i), _numel(t)) for i, t in zip(inputs, results, strict=False)]
    return ", ".join(f"{dtype}[{sent} -> {received}]" for dtype, sent, received in sizes)


def _sent(launch: fx.Node, result: Any) -> str:
    """Return how many elements go in for a result of a launch of ours, which may send a part of its input."""
    numel, ranks = _numel(result), collectives.world_size_of(launch)
    if launch.target in collectives.ALL_REDUCES:
        return numel
    if numel == "?" or not ranks:
        return "?"
    return str(int(numel) * ranks if launch.target in collectives.REDUCTIONS else int(numel) // ranks)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _dtype(value: Any) -> str:
    return text.dtype_text(value.dtype) if isinstance(value, Tensor) else "?"


def _numel(value: Any) -> str:
    """Return the number, or a question mark if it is symbolic: names of symbols differ between ranks."""
    numel = value.numel() if isinstance(value, Tensor) else None
    return str(numel) if isinstance(numel, int) else "?"
