"""Graphs as text: the one format of golden tests, errors, logs and dumps.

One node per line: `%name: dtype[shape] = namespace.op(args)  # key=value`. Lines that begin with `#` name the module
whose code the nodes below come from; a graph begins in its root module. No object ids, devices, paths or versions: the
same graph has the same text on every rank, machine and torch release.

[Note: printed names]
A node prints under its own name, except two kinds of inputs, which torch calls `primals_1`, `primals_2`, ...: the flat
of a unit prints as `%shard_<unit>`, and an input of the user's code as that code calls it. If another node has the name
already, a number is appended. `graph_text` and `window` give a node the same name.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.ir import ops, tags

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
_NOT_PRINTED = ("device", "pin_memory")
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps|hpu|npu|mtia|meta|privateuseone)(:\d+)?")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LONG = 8
"""Lists of one repeated number print in short from this length on."""

Names = Mapping[fx.Node, str]
"""The nodes that do not print under their own name."""


def graph_text(graph: fx.Graph) -> str:
    """Print the whole graph: one line per node, and a comment wherever the module changes that the nodes come from."""
    return "\n".join(_lines(graph))


def window(node: fx.Node, lines: int = 10) -> str:
    """Print the nodes around `node`, which an arrow marks; for error messages."""
    nodes, names = list(node.graph.nodes), _names(node.graph)
    at = nodes.index(node)
    near = nodes[max(0, at - lines) : at + lines + 1]
    return "\n".join(("-> " if n is node else "   ") + _line(n, names) for n in near)


def name_of(node: fx.Node) -> str:
    """Return the name under which a node prints, without the `%`."""
    return _names(node.graph)[node] if _wanted_name(node) else node.name


def module_of(node: fx.Node) -> str | None:
    """Return the FQN of the module whose code `node` comes from, forward or backward; `None` if the node has none."""
    name = _section(node, "").removesuffix(" (backward)")
    return "" if name == "root" else name or None


def type_text(node: fx.Node) -> str:
    """Return the type of a node's value, such as `f32[2, 4]`; empty if the graph does not say."""
    return _type(node.meta.get("val", node.meta.get("example_value")))


def dtype_text(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: `f32`, `bf16`, `i64`."""
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


# ---- names


def _names(graph: fx.Graph) -> Names:
    wanted = {n: name for n in graph.find_nodes(op="placeholder") if (name := _wanted_name(n))}
    if not wanted:
        return {}
    taken = {node.name for node in graph.nodes if node not in wanted}
    names: dict[fx.Node, str] = {}
    for node, name in wanted.items():
        names[node] = free_name(name, taken)
        taken.add(names[node])
    return names


def _wanted_name(node: fx.Node) -> str | None:
    if node.op != "placeholder":
        return None
    if flat := _flat_of(node):
        unit, shard = flat
        return f"shard_{_word(unit) or 'root'}" + (f"_{shard}" if shard else "")
    return _word(tags.meta_of(node).input) or None


def _flat_of(placeholder: fx.Node) -> tuple[str, int] | None:
    """Return unit and index of the shard that an input is, from its tag or from a marker that reads it."""
    if shard := tags.meta_of(placeholder).shard:
        return shard
    marker = next((user for user in placeholder.users if ops.is_unshard(user)), None)
    unit, hash_, index = str(marker.args[1]).rpartition("@")[0].rpartition("#") if marker is not None else ("", "", "")
    return (unit, int(index)) if hash_ and index.isdigit() else None


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_")


def free_name(name: str, taken: Container[str]) -> str:
    """Return `name`, with a number if it is in `taken`."""
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


# ---- lines


def _lines(graph: fx.Graph) -> Iterator[str]:
    names = _names(graph)
    section = "root"
    for node in graph.nodes:
        here = _section(node, section)
        if here != section:
            yield f"# {here}"
            section = here
        yield _line(node, names)


def _line(node: fx.Node, names: Names) -> str:
    if node.op == "output":
        results = node.args[0]
        return f"return {_args(results, names) if isinstance(results, list | tuple) else _arg(results, names)}"
    type_ = type_text(node)
    left = f"%{names.get(node, node.name)}: {type_}" if type_ else f"%{names.get(node, node.name)}"
    return f"{left} = {_call(node, names)}{_comments(node, names)}"


def _call(node: fx.Node, names: Names) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"get_attr.{node.target}"
    target = f"{node.op}.{node.target}" if isinstance(node.target, str) else _callable(node.target)
    named = (f"{key}={_arg(value, names)}" for key, value in node.kwargs.items() if key not in _NOT_PRINTED)
    args = node.args
    if node.target in (ops.REGION, ops.REGION_BACKWARD):  # its name ends with a digest, which machines do not share
        args = (args[0], str(args[1]).partition(":")[0], *args[2:])
    return f"{target}({', '.join([*(_arg(a, names) for a in args), *named])})"


def _comments(node: fx.Node, names: Names) -> str:
    marks = tags.meta_of(node).printed()
    first = []
    if node.op == "placeholder" and (flat := _flat_of(node)):
        unit, shard = flat
        first.append(f"flat{f' {shard}' if shard else ''} of {unit or 'root'}")
        marks.pop("shard", None)
    if marks.get("input") == names.get(node):
        marks.pop("input", None)
    policy = node.meta.get("recompute")
    if isinstance(policy, CheckpointPolicy):
        marks["recompute"] = policy.name
    comments = [*first, *(f"{key}={marks[key]}" for key in sorted(marks))]
    return "".join(f"  # {_one_line(comment)}" for comment in comments)


# ---- modules


def _section(node: fx.Node, current: str) -> str:
    """Return the module whose code `node` comes from; `current` if the node does not say."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return current
    if stack := node.meta.get("nn_module_stack"):
        return _innermost(stack)
    if stack := node.meta.get("fwd_nn_module_stack"):
        return f"{_innermost(stack)} (backward)"
    trace = node.meta.get("stack_trace")
    if trace and "Gradient addition node" not in trace:  # code of the user's, outside all submodules
        return "root (backward)" if current.endswith(" (backward)") else "root"
    return current


def _innermost(stack: Mapping[str, tuple[str, Any]]) -> str:
    """Return the FQN of the last module of an `nn_module_stack`, relative to what was compiled."""
    # Dynamo writes `L['self'].blocks.0`, `L['self']._modules['blocks']._modules['0']`, `L['model'].blocks[0]`.
    path, _ = list(stack.values())[-1]
    path = re.sub(r"^[LG]\['[^']*'\]|\.__closure__\[\d+\]\.cell_contents|\b_modules(?=\[)", "", path)
    names = (name for name in re.split(r"[\[\]'.]+", path) if name not in ("", "_orig_mod"))
    return ".".join(names) or "root"


# ---- values


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, _SYMBOLIC):
        return f"Sym({value})"
    if isinstance(value, list | tuple) and value:
        return f"({', '.join(_type(v) or str(type(v).__name__) for v in value)})"
    return ""


def _args(values: Iterable[Any], names: Names) -> str:
    return ", ".join([_arg(value, names) for value in values])


def _arg(value: Any, names: Names) -> str:
    if isinstance(value, fx.Node):
        return f"%{names.get(value, value.name)}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, torch.device) or (isinstance(value, str) and _DEVICE.fullmatch(value)):
        return "device"
    if value is None or isinstance(value, str | int | float | complex):
        return repr(value)
    if isinstance(value, list | tuple):
        return _list(value, names)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_arg(k, names)}: {_arg(v, names)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        parts = [value.start, value.stop] + ([] if value.step is None else [value.step])
        return ":".join("" if part is None else _arg(part, names) for part in parts)
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, torch.layout | torch.memory_format):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        return _type(value)
    return str(value) if isinstance(value, _SYMBOLIC) else _callable(value)


def _list(values: Sequence[Any], names: Names) -> str:
    if len(values) >= _LONG and len({(type(v), v) for v in values if isinstance(v, int | float)}) == 1:
        return f"[{values[0]!r}] * {len(values)}"
    return f"[{_args(values, names)}]"


def _callable(value: Any) -> str:
    """Return the name of an op or function; for what has none, its repr without the address."""
    if isinstance(value, torch._ops.OpOverload):
        overload = "" if value._overloadname == "default" else f".{value._overloadname}"
        return f"{_NAMESPACES.get(value.namespace, value.namespace)}.{value._opname}{overload}"
    if isinstance(value, torch._ops.OpOverloadPacket):
        namespace, _, op = value._qualified_op_name.partition("::")
        return f"{_NAMESPACES.get(namespace, namespace)}.{op}"
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and callable(value):
        return name
    return _one_line(re.sub(r"( object)? at 0x[0-9a-fA-F]+", "", repr(value)))


def _one_line(text: str) -> str:
    return "\\n".join(text.splitlines())
