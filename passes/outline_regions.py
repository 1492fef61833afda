"""Call the code of repeated units instead of repeating it."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx import GraphModule

from fxshard import torch_private
from fxshard.ir import ops
from fxshard.ir.regions import Region
from fxshard.passes._base import GraphPass, PassContext, Property

MIN_NODES = 4
"""Fewer nodes are not worth a call."""


@dataclass(frozen=True, kw_only=True)
class OutlineRegions(GraphPass):
    """Put one call in the place of the code of each unit whose code occurs at least twice.

    Before   %w = unshard(%shard_0)   %x = linear(%input, %w)   %y = relu(%x)
             %v = unshard(%shard_1)   %z = linear(%y, %v)       %u = relu(%z)     return %u
    After    %w = unshard(%shard_0)   %y = region([%input, %w], 'Block_1f2e')[0]
             %v = unshard(%shard_1)   %u = region([%y, %v], 'Block_1f2e')[0]      return %u

    The code of a unit is a span of nodes that Dynamo traced inside of one call of its module; markers move before it.
    Runs are equal if their ops, their constants and the layouts of what they read are.

    Numerics: unchanged. Memory: unchanged, where the partitioner saves the same of a region as of the whole graph.
    No-op: no unit's code occurs twice.
    Limits: left alone, with a remark: what writes to its inputs, gives out views, has sizes that are not known, or
        holds a higher-order op (activation checkpointing, cond).
    Source: [Note: regions] in `ir/regions.py`.
    """

    requires = frozenset({Property.MARKED})

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
        groups: dict[tuple[Any, ...], list[_Span]] = defaultdict(list)
        matters = _leading_to_a_loss(gm.graph)
        for span in _spans(gm.graph):
            why = span.refused(matters)
            if why:
                ctx.decline(span.nodes[0], why)
            else:
                groups[span.module, *span.text(), *(id(node.target) for node in span.nodes)].append(span)
        changed, names = False, Counter[str]()
        for spans in groups.values():
            if len(spans) < 2:
                continue
            names[spans[0].module] += 1
            number = "" if names[spans[0].module] == 1 else f"_{names[spans[0].module]}"
            code, parameters = spans[0].copied(), [ops.is_unshard(node) for node in spans[0].operands]
            region = ctx.trace_region(f"{spans[0].module}{number}", repr(spans[0].text()), code, parameters)
            if isinstance(region, str):
                ctx.decline(spans[0].nodes[0], f"its code occurs {len(spans)} times, but {region}")
                continue
            for span in spans:
                span.call(region)
            changed = True
        return changed


@dataclass(eq=False)
class _Span:
    """Consecutive nodes of one call of a sharded module."""

    module: str  # its class
    nodes: list[fx.Node]

    @property
    def operands(self) -> list[fx.Node]:
        """What it reads."""
        inside = set(self.nodes)
        found = (source for node in self.nodes for source in node.all_input_nodes)
        return list(dict.fromkeys(source for source in found if source not in inside))

    @property
    def results(self) -> list[fx.Node]:
        """What others read of it."""
        inside = set(self.nodes)
        return [node for node in self.nodes if any(user not in inside for user in node.users)]

    def refused(self, matters: set[fx.Node]) -> str:
        """Why it cannot be a region, as far as one can tell by looking at it; empty if it can."""
        for node in (*self.operands, *self.nodes):
            if node.op == "get_attr" or isinstance(node.target, torch_private.HigherOrderOperator):
                return "it calls a subgraph"
            leaves = _leaves(node.meta.get("example_value"))
            if not all(isinstance(leaf, Tensor) and torch_private.is_plain_and_static(leaf) for leaf in leaves):
                return "it handles something that is not a tensor of known size"
        if not all(isinstance(node.meta.get("example_value"), Tensor) for node in (*self.operands, *self.results)):
            return "it takes or gives several tensors as one value"
        if any(node.meta["example_value"].requires_grad and node not in matters for node in self.results):
            return "a result could have a gradient but leads to no loss"
        return "" if self.results else "it has no result"

    def text(self) -> tuple[str, ...]:
        """What is equal for equal code, in every process: a line per operand and node, and the results."""
        place = {node: f"%{i}" for i, node in enumerate([*self.operands, *self.nodes])}
        read = (repr((_layout(n.meta["example_value"]), ops.is_unshard(n))) for n in self.operands)
        done = (
            repr((torch_private.target_text(n), fx.map_arg((n.args, n.kwargs), place.__getitem__))) for n in self.nodes
        )
        return (*read, *done, repr([place[node] for node in self.results]))

    def copied(self) -> GraphModule:
        """Copy it into a graph of its own."""
        graph, env = fx.Graph(), {}
        for i, node in enumerate(self.operands):
            env[node] = graph.placeholder(f"operand_{i}")
            env[node].meta["example_value"] = node.meta["example_value"]
        for node in self.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[node] for node in self.results))
        return GraphModule(nn.Module(), graph)

    def call(self, region: Region) -> None:
        """Replace it by a call."""
        first, graph = self.nodes[0], self.nodes[0].graph
        operands, results = self.operands, self.results
        stack: dict[str, Any] = {
            key: first.meta[key] for key in ("nn_module_stack", "stack_trace") if key in first.meta
        }
        for node in operands:
            if ops.is_unshard(node):
                first.prepend(node)
        with graph.inserting_after(self.nodes[-1]):
            call = graph.call_function(ops.REGION, (operands, region.name))
        call.meta = {**stack, "example_value": [node.meta["example_value"] for node in results]}
        inside, after = set(self.nodes), call
        for i, result in enumerate(results):
            with graph.inserting_after(after):
                after = graph.call_function(operator.getitem, (call, i))
            after.meta = {**stack, "example_value": result.meta["example_value"]}
            result.replace_all_uses_with(after, delete_user_cb=lambda user: user not in inside)
        for node in reversed(self.nodes):
            graph.erase_node(node)


def _spans(graph: fx.Graph) -> Iterator[_Span]:
    """Cut the graph where the innermost call of a sharded module changes; markers and their calls do not count."""
    current: tuple[str, str] | None = None
    nodes: list[fx.Node] = []
    for node in [*graph.nodes]:
        if ops.is_unshard(node):
            continue
        call = _call_of(node) if node.op in ("call_function", "call_method") else None
        if call != current:
            if current is not None and len(nodes) >= MIN_NODES:
                yield _Span(current[1], nodes)
            current, nodes = call, []
        nodes.append(node)


def _leading_to_a_loss(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that backward gives a gradient: a region's backward takes one for each differentiable result."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        leads = node.op == "output" or any(user in found for user in node.users)
        if leads and (node.op == "output" or _requires_grad(node.meta.get("example_value"))):
            found.add(node)
    return found


def _requires_grad(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in _leaves(value))


def _call_of(node: fx.Node) -> tuple[str, str] | None:
    """Return which call of a sharded module a node belongs to, and the module's class."""
    stack = node.meta.get("nn_module_stack") or {}
    found = [(key, cls) for key, (_, cls) in stack.items() if getattr(cls, "_fxshard_unit", False)]
    return (found[-1][0], found[-1][1].__name__.removeprefix("Sharded")) if found else None


def _leaves(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list | tuple) else [value]


def _layout(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), str(value.dtype), str(value.device), value.requires_grad
