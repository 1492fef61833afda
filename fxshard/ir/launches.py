"""The order of collectives in a graph: what all ranks must have in common, and how Inductor is made to keep it.

[Note: pins]
A node is *pinned* by a tag that names the node which it must come after. Graphs stay as they are to read, to verify and
to estimate; only right before Inductor lowers a graph, `enforce` turns the tags into its `control_deps`, a private op
of torch that is used here and nowhere else. That of torch 2.11 takes no op that gives no tensor; there such a node
stands where Inductor puts it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._inductor import ir as inductor_ir
from torch._inductor import lowering
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._inductor.kernel import conv
from torch.utils._ordered_set import OrderedSet
from torch.utils.flop_counter import flop_registry

from fxshard.ir import collectives, ops, tags, text

_SHORT = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
}
_MORE_KERNELS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward,
    torch.ops.fxshard.addmm_acc,
)
"""Kernels that torch's table of FLOPs leaves out."""


_PINS_ALL = "void" in inspect.getsource(lowering.control_deps_op_lowering)
"""A probe: whether `control_deps` takes every op."""

CONVOLUTION_TAKES_VIEWS = "realize_input(bias)" in inspect.getsource(conv.convolution)
"""A probe: a bias that is not realized may be a view, which has no layout of its own to freeze; see `biases.py`."""

_UNPINNED = (torch.ops.fxshard.addmm_acc,)
"""What it does not take where it does not take all."""


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

    def renamed(self, names: Mapping[str, str]) -> Launch:
        """The same for other units: blocks that are compiled one by one share a graph; `names` are by unit key."""
        units = ", ".join(names.get(unit, unit) for unit in self.serves.split(", "))
        return self._replace(text=self.text.removesuffix(self.serves) + units, serves=units)


def sequence(graph: fx.Graph) -> tuple[Launch, ...]:
    """The collectives that a run of `graph` launches, in order; those of the user's code included."""
    return tuple(_launch(node) for node in graph.nodes if collectives.is_launch(node))


def is_kernel(node: fx.Node) -> bool:
    """Whether a node is a kernel of its own, which Inductor fuses with nothing that comes before it."""
    packet = _packet_of(node)
    return packet in flop_registry or packet in _MORE_KERNELS


def _packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


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


# ---- pins


def pin(node: fx.Node, before: fx.Node) -> bool:
    """Say that `node` comes after `before`, unless it reads it anyway; see [Note: pins].

    Returns:
        Whether that is news.
    """
    tensor = _tensor_of(before)
    if tensor is None or {before, tensor} & set(node.all_input_nodes):
        return False
    known = _names_before(node)
    if tensor.name not in known:
        tags.tag(node, tags.AFTER, ",".join((*known, tensor.name)))
    return tensor.name not in known


def _names_before(node: fx.Node) -> list[str]:
    return [name for name in tags.tags_of(node).get(tags.AFTER, "").split(",") if name]


def _tensor_of(node: fx.Node) -> fx.Node | None:
    """The node, or one of its results where it has several: torch 2.11 takes nothing but a tensor."""
    if isinstance(node.meta.get("val"), Tensor):
        return node
    return next((user for user in node.users if user.target is operator.getitem), None)


def enforce(graph: fx.Graph) -> None:
    """Turn pins into dependencies that Inductor's scheduler keeps."""
    nodes = {node.name: node for node in graph.nodes}
    pinned = [node for node in graph.nodes if _PINS_ALL or _packet_of(node) not in _UNPINNED]
    before = {node: [nodes[name] for name in _names_before(node) if name in nodes] for node in pinned}
    preserve_node_ordering(graph, {node: OrderedSet(found) for node, found in before.items() if found})


# ---- ops on side streams


def _as_collective(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """What Inductor makes of an op whose result is waited for: it keeps what the op reads until the wait.

    Of an op that takes and gives lists, the wait for a result keeps the input of the same index; of one that gives a
    tensor, the wait keeps the first input, so it takes no other.
    """

    def lower(*args: Any) -> Any:
        made = inductor_ir._CollectiveKernel.create_out_of_place(op, *args)
        if isinstance(made, list):
            return [inductor_ir.TensorBox.create(tensor) for tensor in made]
        return inductor_ir.TensorBox.create(made)

    return lower


for _op in (ops.GATHER_ASIDE, ops.REDUCE_ASIDE, ops.COPY_OUT):
    lowering.add_layout_constraint(_op, lowering.constrain_to_fx_strides)
    lowering.register_lowering(_op, type_promotion_kind=None)(_as_collective(_op))
