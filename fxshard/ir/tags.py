"""Tags: what a node means to the plan, in `node.meta["fxshard"]`.

[Note: tags]
Passes rewrite how a parameter is gathered and how a gradient is reduced; what stays is which node *is* the unsharded
parameter and which node *is* a gradient. Those nodes carry a `NodeMeta` with the parameter's FQN, so that the verifier,
the printer and the cost model need not guess from the shape of a graph. A pass that replaces a tagged node tags the new
one. The printer writes tags behind a node under these names:

    shard=blocks.0#0        a graph input that is the flat of that unit's shard 0, or a copy of it on the device
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

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torch import fx

from fxshard import torch_private
from fxshard.ir import collectives, ops
from fxshard.ir.plan import FramePlan

KEY = "fxshard"

COPY_IN, COPY_OUT, REDUCE = "copy_in", "copy_out", "reduce"
"""Side streams: before a gather, after it, and before a reduction."""

TO_DEVICE, TO_HOST = "to_device", "to_host"
"""Side streams of the copies of offloaded shards: one for each direction of the link between host and device."""


class ShardKey(NamedTuple):
    """A shard: key of its unit, and which of the unit's it is."""

    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.unit}#{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeta:
    """What a node is, by the names in [Note: tags]; empty where it is nothing of the kind.

    `grads` are several where one sum is the gradient of several parameters; `calls` print as `unit=`.
    """

    shard: ShardKey | None = None
    input: str = ""
    param: str = ""
    kept: str = ""
    grads: tuple[str, ...] = ()
    acc: str = ""
    resident: str = ""
    after: tuple[str, ...] = ()
    control_deps: tuple[str, ...] = ()
    stream: str = ""
    calls: tuple[tuple[str, str], ...] = ()

    def __or__(self, other: NodeMeta) -> NodeMeta:
        """Join both; where both say something, the other one counts."""
        return replace(self, **{each.name: value for each in fields(other) if (value := getattr(other, each.name))})

    def printed(self) -> dict[str, str]:
        """Return the tags by name as text, sorted."""
        texts = {
            "acc": self.acc,
            "after": ",".join(self.after),
            "control_deps": ",".join(self.control_deps),
            "grad": ",".join(self.grads),
            "input": self.input,
            "kept": self.kept,
            "param": self.param,
            "resident": self.resident,
            "shard": str(self.shard or ""),
            "stream": self.stream,
            "unit": " & ".join(f"{unit}@{call}" for unit, call in self.calls),
        }
        return {name: text for name, text in texts.items() if text}


_NOTHING = NodeMeta()


def meta_of(node: fx.Node) -> NodeMeta:
    """Return what the node is."""
    found: NodeMeta = node.meta.get(KEY, _NOTHING)
    return found


def tag(node: fx.Node, **changes: Any) -> None:
    """Set fields of what a node is; other nodes that share the meta dictionary's value keep theirs."""
    node.meta[KEY] = replace(meta_of(node), **changes)


def tag_grad(node: fx.Node, fqn: str) -> None:
    """Add a parameter whose gradient the node is."""
    known = meta_of(node).grads
    if fqn not in known:
        tag(node, grads=(*known, fqn))


def units_of(node: fx.Node) -> dict[str, str]:
    """Map the units that a launch or wait serves -> which call of each."""
    return dict(meta_of(node).calls)


def tag_units(node: fx.Node, calls: Mapping[str, str]) -> None:
    """Say which units a launch or wait serves, and which call of each."""
    tag(node, calls=tuple(calls.items()))


def launches_of(graph: fx.Graph, targets: Collection[object]) -> list[fx.Node]:
    """Return the launches of a kind that passes inserted, in program order; a model may launch collectives as well."""
    return [node for node in graph.nodes if node.target in targets and meta_of(node).calls]


def shards_of(graph: fx.Graph) -> dict[ShardKey, fx.Node]:
    """Return the flats among the inputs of a graph."""
    inputs = graph.find_nodes(op="placeholder")
    return {shard: node for node in inputs if (shard := meta_of(node).shard) is not None}


def flat_behind(sent: fx.Node) -> fx.Node:
    """Return the flat, or its copy on the device, of which `sent` is a cast or a part."""
    while meta_of(sent).shard is None:
        (sent,) = sent.all_input_nodes
    return sent


def resident_behind(node: fx.Node) -> str:
    """Return the parameter that `node` has waited for, if its launch is outside of the graph."""
    source = node.args[0] if collectives.is_wait(node) else None
    return meta_of(source).resident if isinstance(source, fx.Node) else ""


def tag_markers(graph: fx.Graph, plan: FramePlan) -> None:
    """Tag a graph's inputs and what its markers read and write; called before the first pass of a stage.

    Tags of earlier stages are dropped first, except on inputs: torch's passes in between copy metadata onto their
    nodes.
    """
    for node in graph.nodes:
        if node.op != "placeholder" and KEY in node.meta:
            del node.meta[KEY]
    for node in graph.nodes:
        if node.op == "placeholder":
            index = torch_private.input_index(node)
            if index is not None and index < len(plan.input_names) and plan.input_names[index]:
                tag(node, input=plan.input_names[index])
        elif ops.is_unshard(node):
            key = ops.key_of(node)
            flat = node.args[0]
            assert isinstance(flat, fx.Node)
            tag(flat, shard=ShardKey(key.unit, key.shard))
            tag(node, param=plan.parameter_name(key.unit, key.shard, ops.slot_of(node)))
        elif resident := resident_behind(node):
            tag(node, param=resident)
        elif ops.is_reduce_grad(node):
            key, grad = ops.key_of(node), node.args[0]
            assert isinstance(grad, fx.Node)
            tag_grad(grad, plan.parameter_name(key.unit, key.shard, ops.slot_of(node)))
