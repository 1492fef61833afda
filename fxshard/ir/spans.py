"""Spans of Dynamo's graph: code that may be cut out of it, because it belongs to one call of a sharded module.

A span is found by what Dynamo says of its nodes, and compared by its text; see [Note: regions] in `ir/regions.py`.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx import GraphModule

from fxshard import torch_private
from fxshard.ir import ops
from fxshard.ir.regions import Region

MIN_NODES = 4
"""Fewer nodes are not worth a call."""


class Surroundings:
    """What the rest of a graph says of a part of it.

    Attributes:
        decided_by: node -> a node before it that has changed torch's state, for what comes until it is changed back: it
            gives no tensor, and may begin autocast, or choose a kernel for attention.
        matter: the nodes that backward gives a gradient; a region's backward takes one for each differentiable result.
    """

    def __init__(self, graph: fx.Graph) -> None:
        calls = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
        self.decided_by = _deciding(graph)
        self.matter = _leading_to_a_loss(graph)
        self._writes: dict[int, set[fx.Node]] = defaultdict(set)
        for node in filter(torch_private.writes_in_place, calls):
            for value in (value for source in node.all_input_nodes for value in _tensors(source)):
                self._writes[torch_private.storage_id(value)].add(node)

    def writes_to(self, node: fx.Node, inside: list[fx.Node]) -> bool:
        """Return whether other nodes than these write to the memory of a node."""
        return any(self._writes[torch_private.storage_id(value)] - set(inside) for value in _tensors(node))


@dataclass(eq=False)
class Span:
    """Consecutive nodes of one call of a sharded module."""

    module: str  # its class
    nodes: list[fx.Node]

    @property
    def reads(self) -> list[fx.Node]:
        """What it reads, in the graph that its code stands in."""
        inside = set(self.nodes)
        found = (source for node in self.nodes for source in node.all_input_nodes)
        return list(dict.fromkeys(source for source in found if source not in inside))

    @property
    def results(self) -> list[fx.Node]:
        """What others read of it."""
        inside = set(self.nodes)
        return [node for node in self.nodes if any(user not in inside for user in node.users)]

    def refused(self, surroundings: Surroundings) -> str:
        """Say why it cannot be a region, as far as one can tell by looking at it; empty if it can."""
        if (deciding := surroundings.decided_by.get(self.nodes[0])) is not None:
            return f"it stands behind %{deciding.name}, which may decide what it computes"
        for node in (*self.reads, *self.code):
            if node.op == "get_attr" or isinstance(node.target, torch_private.HigherOrderOperator):
                return "it calls a subgraph"
            if not torch_private.is_of_torch(node):
                return f"nothing tells what {torch_private.target_text(node)} computes"
            leaves = _leaves(node.meta.get("example_value"))
            if not all(isinstance(leaf, Tensor) and torch_private.is_plain_and_static(leaf) for leaf in leaves):
                return "it handles something that is not a tensor of known size"
        if not all(isinstance(node.meta.get("example_value"), Tensor) for node in (*self.reads, *self.results)):
            return "it takes or gives several tensors as one value"
        if any(surroundings.writes_to(node, self.nodes) for node in (*self.reads, *self.results)):
            return "what it reads or gives is written to elsewhere"
        if any(_requires_grad(node.meta["example_value"]) and node not in surroundings.matter for node in self.results):
            return "a result could have a gradient but leads to no loss"
        return "" if self.results else "it has no result"

    @property
    def code(self) -> list[fx.Node]:
        """The nodes that compute."""
        return self.nodes

    @property
    def gives(self) -> list[fx.Node]:
        """What its code gives, in the order of the results."""
        return self.results

    def text(self) -> tuple[str, ...]:
        """Return what is equal for equal code in every process: a line per operand and node, and what it gives."""
        place = {node: f"%{i}" for i, node in enumerate([*self.reads, *self.code])}
        read = (repr((_layout(n.meta["example_value"]), ops.is_unshard(n))) for n in self.reads)
        done = (
            repr((torch_private.target_text(n), fx.map_arg((n.args, n.kwargs), place.__getitem__))) for n in self.code
        )
        return (*read, *done, repr([place.get(node) for node in self.gives]))

    def identities(self) -> tuple[int, ...]:
        """Return what tells functions of one name apart, in this process."""
        return tuple(id(node.target) for node in self.code if node.op == "call_function")

    def copied(self) -> GraphModule:
        """Copy it into a graph of its own."""
        return GraphModule(nn.Module(), _copied(self.reads, self.code, self.gives))

    def operands(self) -> list[fx.Node]:
        """Have what it reads stand before it."""
        for node in self.reads:
            if ops.is_unshard(node):
                self.nodes[0].prepend(node)
        return self.reads

    def call(self, region: Region, number: int) -> None:
        """Replace it by a call, numbered among those of the graph."""
        first, graph = self.nodes[0], self.nodes[0].graph
        operands, results = self.operands(), self.results
        stack: dict[str, Any] = {
            key: first.meta[key] for key in ("nn_module_stack", "stack_trace") if key in first.meta
        }
        with graph.inserting_after(self.nodes[-1]):
            call = graph.call_function(ops.REGION, (operands, region.name, number))
        call.meta = {**stack, "example_value": [node.meta["example_value"] for node in results]}
        inside, after = set(self.nodes), call
        for i, result in enumerate(results):
            with graph.inserting_after(after):
                after = graph.call_function(operator.getitem, (call, i))
            after.meta = {**stack, "example_value": result.meta["example_value"]}
            result.replace_all_uses_with(after, delete_user_cb=lambda user: user not in inside)
        for node in reversed(self.nodes):
            graph.erase_node(node)


class CheckpointedSpan(Span):
    """A function under activation checkpointing: a node for it, its call, and the results that are read of the call."""

    def __init__(self, function: fx.Node, call: fx.Node, body: GraphModule) -> None:
        super().__init__("", [function, call, *call.users])
        self._call, self._body = call, body
        calls = [found for node in body.graph.nodes if (found := _call_of(node)) is not None]
        self.module = calls[0][1] if calls else ""

    @property
    def reads(self) -> list[fx.Node]:
        """The inputs of the function but flats, and the markers in it."""
        places = self._body.graph.find_nodes(op="placeholder")
        inputs = [node for node in places if any(not ops.is_unshard(user) for user in node.users)]
        return [*inputs, *filter(ops.is_unshard, self._body.graph.nodes)]

    @property
    def code(self) -> list[fx.Node]:
        """The nodes of the function that compute."""
        nodes = self._body.graph.nodes
        return [node for node in nodes if node.op not in ("placeholder", "output") and not ops.is_unshard(node)]

    @property
    def results(self) -> list[fx.Node]:
        """What is read of the call."""
        return self.nodes[2:]

    @property
    def gives(self) -> list[fx.Node]:
        """What the function returns of it."""
        given: Any = self._body.graph.output_node().args[0]
        return [given[read.args[1]] for read in self.results]

    def refused(self, surroundings: Surroundings) -> str:
        """Say why it cannot be a region; empty if it can."""
        if self._body.meta.get("_checkpoint_context_fn") is not None:  # a region's name could not tell two apart
            return "a policy of its own decides what checkpointing keeps"
        if any(read.target is not operator.getitem for read in self.results):
            return "its results are not read one by one"
        if not all(isinstance(node, fx.Node) for node in self.gives):
            return "it gives something that is not a tensor"
        return super().refused(surroundings)

    def text(self) -> tuple[str, ...]:
        """Return what is equal for equal code, the options of checkpointing included."""
        return (*super().text(), f"checkpointed {self._call.kwargs}")

    def copied(self) -> GraphModule:
        """Copy the call, of a function without markers."""
        graph, body = fx.Graph(), GraphModule(self._body, _copied(self.reads, self.code, self.gives))
        body.meta.update(self._body.meta)
        operands = [graph.placeholder(f"operand_{i}") for i in range(len(self.reads))]
        for operand, node in zip(operands, self.reads, strict=True):
            operand.meta["example_value"] = node.meta["example_value"]
        call = graph.call_function(
            self._call.target,  # type: ignore[arg-type]
            (graph.get_attr("body"), *operands),
            dict(self._call.kwargs),
        )
        call.meta = {**self._call.meta, "example_value": tuple(node.meta["example_value"] for node in self.gives)}
        graph.output(tuple(graph.call_function(operator.getitem, (call, i)) for i in range(len(self.gives))))
        return GraphModule({"body": body}, graph)

    def operands(self) -> list[fx.Node]:
        """Put the markers before the call."""
        found, places = [], self._body.graph.find_nodes(op="placeholder")
        given = dict(zip(places, self._call.args[1:], strict=True))
        for node in self.reads:
            outer = given.get(node)
            if ops.is_unshard(node):
                flat, *rest = node.args
                with self.nodes[0].graph.inserting_before(self.nodes[0]):
                    outer = self.nodes[0].graph.call_function(ops.UNSHARD, (given[flat], *rest))
                outer.meta = dict(node.meta)
            assert isinstance(outer, fx.Node)
            found.append(outer)
        return found


def _copied(reads: list[fx.Node], code: list[fx.Node], gives: list[fx.Node]) -> fx.Graph:
    graph, env = fx.Graph(), {}
    for i, node in enumerate(reads):
        env[node] = graph.placeholder(f"operand_{i}")
        env[node].meta["example_value"] = node.meta["example_value"]
    for node in code:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in gives))
    return graph


def spans_of(gm: GraphModule) -> Iterator[Span]:
    """Find what may be a region: functions under activation checkpointing, and the code of modules."""
    for call in gm.graph.find_nodes(op="call_function", target=torch_private.CHECKPOINT):
        function: Any = call.args[0]
        span = CheckpointedSpan(function, call, cast(GraphModule, gm.get_submodule(function.target)))
        if len(span.code) >= MIN_NODES:
            yield span
    yield from _plain_spans(gm.graph)


def _plain_spans(graph: fx.Graph) -> Iterator[Span]:
    """Cut the graph where the innermost call of a sharded module changes; markers and their calls do not count."""
    current: tuple[str, str] | None = None
    nodes: list[fx.Node] = []
    for node in [*graph.nodes]:
        if ops.is_unshard(node):
            continue
        call = _call_of(node) if node.op in ("call_function", "call_method") else None
        if call != current:
            if current is not None and len(nodes) >= MIN_NODES:
                yield Span(current[1], nodes)
            current, nodes = call, []
        nodes.append(node)


def _deciding(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map node -> the first of the changes of torch's state that are in force there, if any is."""
    found: dict[fx.Node, fx.Node] = {}
    in_force: dict[object, fx.Node] = {}
    for node in graph.nodes:
        if in_force:
            found[node] = next(iter(in_force.values()))
        is_call = node.op in ("call_function", "call_method") and node.target is not torch_private.LOG_USAGE
        if not is_call or _leaves(node.meta.get("example_value"), Tensor):
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
        if leads and (node.op == "output" or _requires_grad(node.meta.get("example_value"))):
            found.add(node)
    return found


def _requires_grad(value: Any) -> bool:
    return any(leaf.requires_grad for leaf in _leaves(value, Tensor))


def _call_of(node: fx.Node) -> tuple[str, str] | None:
    """Return which call of a sharded module a node belongs to, and the module's class."""
    stack = node.meta.get("nn_module_stack") or {}
    found = [(key, cls) for key, (_, cls) in stack.items() if getattr(cls, "_fxshard_unit", False)]
    return (found[-1][0], found[-1][1].__name__.removeprefix("Sharded")) if found else None


def _leaves(value: Any, of: type = object) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _leaves(each, of)]
    return [value] if isinstance(value, of) else []


def _tensors(node: fx.Node) -> list[Tensor]:
    return _leaves(node.meta.get("example_value"), Tensor)


def _layout(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), str(value.dtype), str(value.device), value.requires_grad
