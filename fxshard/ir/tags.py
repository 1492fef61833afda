"""Tags: what a node means to the plan, in `node.meta["fxshard"]`.

[Note: tags]
Passes rewrite how a parameter is gathered and how a gradient is reduced; what stays is which node *is* the unsharded
parameter and which node *is* a gradient. Those nodes carry a tag with the parameter's FQN, so that the verifier, the
printer and the cost model never have to guess from the shape of a graph. A pass that replaces a tagged node tags the
new one.

    shard=blocks.0#0        a graph input that is the flat of that unit's shard 0
    input=tokens            a graph input, as the user's code calls it
    param=blocks.0.weight   an unsharded parameter
    kept=blocks.0.weight    a graph input of backward that forward saved: a view of that parameter
    grad=blocks.0.weight    a gradient of an unsharded parameter (one of several, where it is read several times)
    acc=blocks.0.weight     a graph input in which the gradients of that parameter are added up
    resident=blocks.0.weight  a graph input that is that parameter, gathered by a launch outside of the graph
    after=mm_3              a node that must come after that one, whatever Inductor fuses
    control_deps=mm_3       the same, once Inductor has been told
    stream=copy_in          a node that runs on that side stream
    unit=blocks.0@0         a launch or wait for that unit; after the @, which call of the unit; several with " & "
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxshard import torch_private
from fxshard.ir import collectives, ops
from fxshard.ir.plan import FramePlan

KEY = "fxshard"

SHARD, INPUT, PARAM, GRAD, UNIT = "shard", "input", "param", "grad", "unit"
AFTER, ENFORCED = "after", "control_deps"
ACCUMULATOR, RESIDENT, KEPT, STREAM = "acc", "resident", "kept", "stream"

COPY_IN, COPY_OUT, REDUCE = "copy_in", "copy_out", "reduce"
"""Side streams: before a gather, after it, and before a reduction."""

_AND = " & "  # a unit of several modules has commas in its name


def tags_of(node: fx.Node) -> dict[str, str]:
    """The node's tags; not to be edited."""
    found: dict[str, str] = node.meta.get(KEY, {})
    return found


def tag(node: fx.Node, key: str, value: str) -> None:
    """Set one tag; other nodes that share the meta dictionary are not affected."""
    node.meta[KEY] = tags_of(node) | {key: value}


def tag_grad(node: fx.Node, fqn: str) -> None:
    """Add a parameter whose gradient the node is: one sum may be the gradient of several."""
    known = grads_of(node)
    if fqn not in known:
        tag(node, GRAD, ",".join((*known, fqn)))


def grads_of(node: fx.Node) -> tuple[str, ...]:
    """The parameters whose gradient the node is."""
    text = tags_of(node).get(GRAD)
    return tuple(text.split(",")) if text else ()


def units_of(node: fx.Node) -> dict[str, str]:
    """The units that a launch or wait serves -> which call of each."""
    text = tags_of(node).get(UNIT)
    parts = [part.rpartition("@") for part in text.split(_AND)] if text is not None else []
    return {unit: call for unit, _, call in parts}


def tag_units(node: fx.Node, calls: Mapping[str, str]) -> None:
    """Say which units a launch or wait serves, and which call of each."""
    tag(node, UNIT, _AND.join(f"{unit}@{call}" for unit, call in calls.items()))


def resident_behind(node: fx.Node) -> str | None:
    """The parameter that `node` has waited for, if its launch is outside of the graph."""
    source = node.args[0] if collectives.is_wait(node) else None
    return tags_of(source).get(RESIDENT) if isinstance(source, fx.Node) else None


def tag_markers(graph: fx.Graph, plan: FramePlan) -> None:
    """Tag a graph's inputs and what its markers read and write; called before the first pass of a stage.

    Torch's passes between two stages copy metadata onto nodes that they make, so what earlier stages tagged is dropped
    first; inputs keep their tags.
    """
    for node in graph.nodes:
        if node.op != "placeholder" and KEY in node.meta:
            del node.meta[KEY]
    for node in graph.nodes:
        if node.op == "placeholder":
            index = torch_private.input_index(node)
            if index is not None and index < len(plan.input_names) and plan.input_names[index]:
                tag(node, INPUT, plan.input_names[index])
        elif ops.is_unshard(node):
            key = ops.key_of(node)
            flat = node.args[0]
            assert isinstance(flat, fx.Node)
            tag(flat, SHARD, f"{key.unit}#{key.shard}")
            tag(node, PARAM, plan.parameter_name(key.unit, key.shard, ops.slot_of(node)))
        elif (resident := resident_behind(node)) is not None:
            tag(node, PARAM, resident)
        elif ops.is_reduce_grad(node):
            key, grad = ops.key_of(node), node.args[0]
            assert isinstance(grad, fx.Node)
            tag_grad(grad, plan.parameter_name(key.unit, key.shard, ops.slot_of(node)))
