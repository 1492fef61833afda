"""Graphs as text: the one format of golden tests, errors, logs and dumps.

One node per line: `%name: dtype[shape] = namespace.op(args)  # key=value`. No object ids, devices, paths or versions,
so that the same graph has the same text on every rank, machine and torch release.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_NAMESPACES = {"_c10d_functional": "c10d"}


def graph_text(graph: fx.Graph) -> str:
    """The whole graph, one node per line."""
    return "\n".join(node_text(node) for node in graph.nodes)


def window(node: fx.Node, lines: int = 10) -> str:
    """The nodes around `node`, which an arrow marks; for error messages."""
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    near = nodes[max(0, at - lines) : at + lines + 1]
    return "\n".join(("-> " if n is node else "   ") + node_text(n) for n in near)


def node_text(node: fx.Node) -> str:
    """One node as one line."""
    if node.op == "output":
        (results,) = node.args
        return f"return {_arg(results)}" if not isinstance(results, list | tuple) else f"return {_args(results)}"
    call = "input" if node.op == "placeholder" else f"{_target(node)}({_call_args(node)})"
    return f"%{node.name}{_type(node.meta.get('val'))} = {call}{_meta(node)}"


def dtype_text(dtype: torch.dtype) -> str:
    """Short name of a dtype: `f32`, `bf16`, `i64`."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f": {dtype_text(value.dtype)}[{', '.join(str(s) for s in value.shape)}]"
    if isinstance(value, torch.SymInt):
        return f": Sym({value})"
    return ""


def _target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        overload = "" if target._overloadname == "default" else f".{target._overloadname}"
        namespace = _NAMESPACES.get(target.namespace, target.namespace)
        return f"{namespace}.{target._opname}{overload}"
    if node.op in ("call_module", "call_method", "get_attr"):
        return f"{node.op}.{target}"
    return getattr(target, "__name__", str(target))


def _call_args(node: fx.Node) -> str:
    named = (f"{key}={_arg(value)}" for key, value in node.kwargs.items() if key not in ("device", "pin_memory"))
    return ", ".join([*(_arg(a) for a in node.args), *named])


def _args(values: Iterable[Any]) -> str:
    return ", ".join(_arg(value) for value in values)


def _arg(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, list | tuple):
        return f"[{_args(value)}]"
    if isinstance(value, torch.layout | torch.memory_format):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch._ops.OpOverload):
        return str(value)
    return repr(value)


def _meta(node: fx.Node) -> str:
    own = node.meta.get("fxshard", {})
    return "".join(f"  # {key}={own[key]}" for key in sorted(own))
