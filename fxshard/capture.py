"""What Dynamo captured: which inputs are flats, which unit and call each marker belongs to, what is not sharded.

Private torch modules used here: `torch._dynamo` (guards' sources, configuration).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch.distributed.tensor import DTensor

from fxshard.errors import InvariantError, UnsupportedGraph
from fxshard.ir import ops
from fxshard.ir.ops import MarkerKey
from fxshard.ir.plan import FramePlan
from fxshard.runtime.unit import Home, Unit, home_of
from fxshard.sharding import ShardedModule


def refuse_compiled_autograd() -> None:
    """Raise if compiled autograd is on: it inlines the backward before our passes have seen it."""
    if dynamo_config.compiled_autograd:
        raise UnsupportedGraph(
            "compiled autograd (torch._dynamo.config.compiled_autograd) is not supported with backend='fxshard': it "
            "inlines backward graphs before fxshard's passes run. Switch it off."
        )


def flats_of(example_inputs: Sequence[Any]) -> dict[int, Home]:
    """Graph input index -> where the flat belongs, for the inputs that are flats."""
    homes = ((i, home_of(value)) for i, value in enumerate(example_inputs) if isinstance(value, Tensor))
    return {i: home for i, home in homes if home is not None}


def unsharded_parameters(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, nn.Parameter]:
    """Name in the user's code -> trainable parameter that enters the graph as it is."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return {
        source_name(node): value
        for node, value in zip(placeholders, example_inputs, strict=True)
        if isinstance(value, nn.Parameter)
        and value.requires_grad
        and not isinstance(value, DTensor)
        and home_of(value) is None
    }


def source_name(placeholder: fx.Node) -> str:
    """Where Dynamo found a graph input, as Python source; the node's name where Dynamo does not say."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", placeholder.name)
    return str(name() if callable(name) else name)


def bind_markers(gm: fx.GraphModule, flats: dict[int, Home]) -> FramePlan:
    """Write the frame's own key into every marker; see [Note: markers] in `ir/ops.py`.

    Args:
        gm: Dynamo's graph, edited in place, subgraphs of higher-order ops included.
        flats: from `flats_of`.

    Returns:
        The plan that the keys refer to.
    """
    keys = _unit_keys([home.unit for home in flats.values()])
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    # A subgraph's input is the same fake tensor as the outer input that Dynamo lifted into it.
    homes = {id(placeholders[i].meta["example_value"]): home for i, home in flats.items()}
    calls: dict[tuple[str, str], int] = {}
    for marker in _markers(gm):
        flat = marker.args[0]
        home = homes.get(id(flat.meta.get("example_value"))) if isinstance(flat, fx.Node) else None
        if home is None:
            raise UnsupportedGraph(
                f"%{marker.name} reads a parameter through {flat}, which is not an input of the captured graph. "
                "Read the parameter outside of the function that transforms it (vmap, cond, custom autograd)."
            )
        unit = keys[id(home.unit)]
        numbered = calls.setdefault((unit, _call(marker)), sum(u == unit for u, _ in calls))
        marker.target = ops.UNSHARD
        marker.args = (flat, str(MarkerKey(unit, home.shard, str(numbered))), *marker.args[2:])
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    units = {keys[id(home.unit)]: home.unit.plan for home in flats.values()}
    return FramePlan(units=units, shard_inputs={i: (keys[id(h.unit)], h.shard) for i, h in flats.items()})


def _markers(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function" and node.target in (torch.ops.fxshard.unshard, ops.UNSHARD):
                    yield node


def _unit_keys(units: Sequence[Unit]) -> dict[int, str]:
    """Unit id -> its FQN, made unique within the graph (two models may use the same names)."""
    keys: dict[int, str] = {}
    for unit in units:
        if id(unit) not in keys:
            key = unit.fqn
            while key in keys.values():
                key += "'"
            keys[id(unit)] = key
    return keys


def _call(marker: fx.Node) -> str:
    """The innermost call of a sharded module that a read belongs to; Dynamo numbers repeated calls of a module."""
    stack = marker.meta.get("nn_module_stack") or {}
    sharded = [key for key, (_, cls) in stack.items() if isinstance(cls, type) and issubclass(cls, ShardedModule)]
    return sharded[-1] if sharded else ""


def require_markers(gm: fx.GraphModule, flats: dict[int, Home]) -> None:
    """Raise if a flat came in that no marker reads: something looked at our memory directly."""
    if flats and next(_markers(gm), None) is None:
        names = ", ".join(home.unit.fqn or "root" for home in flats.values())
        raise InvariantError(f"flats of {names} enter a captured graph that has no parameter read.")


def register_backend(backend: Callable[..., Any], name: str) -> None:
    """Make `torch.compile(backend=name)` find `backend` when the package is imported but not installed."""
    if name not in entry_points(group="torch_dynamo_backends").names:
        torch._dynamo.register_backend(backend, name=name)
