"""Spans of Dynamo's graph: code that may be cut out of it, because it belongs to one call of a sharded module.

A span is found by what Dynamo says of its nodes, and compared by its text; see [Note: regions] in `ir/regions.py`.
"""

from __future__ import annotations

import operator
import uuid
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from fxshard import torch_private
from fxshard.ir import closures, meshes, ops
from fxshard.ir.plan import ParameterKey
from fxshard.ir.surroundings import Surroundings, leaves, requires_grad

MIN_NODES = 4
"""Fewer nodes are not worth a call."""


@dataclass(eq=False)
class Span:
    """Consecutive nodes of one call of a sharded module."""

    module: str  # its class
    nodes: list[fx.Node]

    @property
    def reads(self) -> list[fx.Node]:
        """What it reads, in the graph that its code stands in; meshes are no values, but constants of the code."""
        return [source for source in self._sources if meshes.mesh_of(source) is None]

    @property
    def meshes(self) -> dict[fx.Node, DeviceMesh]:
        """The meshes that it reads."""
        return {source: mesh for source in self._sources if (mesh := meshes.mesh_of(source)) is not None}

    @property
    def _sources(self) -> list[fx.Node]:
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
            values = leaves(node.meta.get("example_value"))
            if not all(isinstance(value, Tensor) and meshes.is_static(value) for value in values):
                return "it handles something that is not a tensor of known size"
        if any(map(_is_collective, self.code)):
            return "it launches a collective"  # of which Inductor's code of a subgraph gives other values
        for value in (node.meta.get("example_value") for node in (*self.reads, *self.results)):
            if not isinstance(value, Tensor):
                return "it takes or gives several tensors as one value"
            if torch_private.is_wrapper(value):
                return f"it takes or gives a {type(value).__name__}"
        if any(surroundings.writes_to(node, self.nodes) for node in (*self.reads, *self.results)):
            return "what it reads or gives is written to elsewhere"
        if any(requires_grad(node.meta["example_value"]) and node not in surroundings.matter for node in self.results):
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

    def cut(self, launch_of: Mapping[ParameterKey, int]) -> list[Span]:
        """Cut it where it first reads a parameter that another launch brings; a few nodes stay with those before."""
        parts: list[list[fx.Node]] = [[]]
        last: int | None = None
        for i, node in enumerate(self.nodes):
            read = [launch_of[ops.parameter_key_of(n)] for n in node.all_input_nodes if ops.is_unshard(n)]
            is_new = bool(read) and last not in (None, *read)
            last = max(read, default=last)
            if is_new and len(parts[-1]) >= MIN_NODES and len(self.nodes) - i >= MIN_NODES:
                parts.append([])
            parts[-1].append(node)
        return [Span(self.module, part) for part in parts]

    def text(self) -> tuple[str, ...]:
        """Return what is equal for equal code in every process: a line per operand and node, and what it gives."""
        place = {node: f"%{i}" for i, node in enumerate([*self.reads, *self.code])}
        place |= {node: repr(meshes.axes_of([mesh])) for node, mesh in self.meshes.items()}
        read = (repr((_layout(n.meta["example_value"]), ops.is_unshard(n))) for n in self.reads)
        done = (
            repr((torch_private.target_text(n), fx.map_arg((n.args, n.kwargs), place.__getitem__))) for n in self.code
        )
        return (*read, *done, repr([place.get(node) for node in self.gives]))

    def identities(self) -> tuple[Hashable, ...]:
        """Return what tells functions of one name apart, in this process."""
        return tuple(id(node.target) for node in self.code if node.op == "call_function")

    def cached_as(self) -> str:
        """Return what tells its code apart in every process, for torch's caches."""
        return str(self.text())

    def copied(self) -> GraphModule:
        """Copy it into a graph of its own."""
        graph, root, env = fx.Graph(), nn.Module(), {}
        for i, node in enumerate(self.reads):
            env[node] = graph.placeholder(f"operand_{i}")
            env[node].meta["example_value"] = node.meta["example_value"]
        for i, (node, mesh) in enumerate(self.meshes.items()):
            setattr(root, f"mesh_{i}", mesh)
            env[node] = graph.get_attr(f"mesh_{i}")
        for node in self.code:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[node] for node in self.gives))
        return GraphModule(root, graph)

    def operands(self) -> list[fx.Node]:
        """Have what it reads stand right before it; a parameter that something before it reads stays where it is."""
        for node in self.reads:
            if ops.is_unshard(node) and not any(user < self.nodes[0] for user in node.users):
                self.nodes[0].prepend(node)
        return self.reads


class CheckpointedSpan(Span):
    """A function under activation checkpointing: a node for it, its call, and the results that are read of the call."""

    def __init__(self, function: fx.Node, call: fx.Node, body: GraphModule) -> None:
        super().__init__("", [function, call, *call.users])
        self._call, self._body = call, body
        calls = [found for node in body.graph.nodes if (found := call_of(node)) is not None]
        self.module = calls[0][1] if calls else ""

    @property
    def _sources(self) -> list[fx.Node]:
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
        if any(read.target is not operator.getitem for read in self.results):
            return "its results are not read one by one"
        if not all(isinstance(node, fx.Node) for node in self.gives):
            return "it gives something that is not a tensor"
        return super().refused(surroundings)

    def cut(self, launch_of: Mapping[ParameterKey, int]) -> list[Span]:
        """Leave it as it is: what is computed again is so as a whole."""
        return [self]

    @property
    def _policy(self) -> Any:
        """What decides which values checkpointing keeps, `None` for none of them."""
        return self._body.meta.get("_checkpoint_context_fn")

    def text(self) -> tuple[str, ...]:
        """Return what is equal for equal code, the options of checkpointing included."""
        return (*super().text(), f"checkpointed {self._call.kwargs} {getattr(self._policy, 'cache_hash', None)}")

    def identities(self) -> tuple[Hashable, ...]:
        """Return what tells functions of one name apart, policies included, in this process."""
        return (*super().identities(), closures.facts_of(self._policy))

    def cached_as(self) -> str:
        """Return what tells its code apart in every process; of a policy only a `cache_hash` does, else it is new."""
        has_a_name = self._policy is None or hasattr(self._policy, "cache_hash")
        return super().cached_as() if has_a_name else f"{self.text()} {uuid.uuid4()}"

    def copied(self) -> GraphModule:
        """Copy the call, of a function without markers."""
        graph, body = fx.Graph(), super().copied()
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


def spans_of(gm: GraphModule) -> Iterator[Span]:
    """Find what may be a region: functions under activation checkpointing, and the code of modules."""
    for call in gm.graph.find_nodes(op="call_function", target=torch_private.CHECKPOINT):
        function: Any = call.args[0]
        span = CheckpointedSpan(function, call, cast(GraphModule, gm.get_submodule(function.target)))
        if len(span.code) >= MIN_NODES:
            yield span
    yield from _plain_spans(gm.graph)


def _plain_spans(graph: fx.Graph) -> Iterator[Span]:
    """Cut the graph where the innermost call of a sharded module changes, and at collectives of the model's own."""
    current: tuple[str, str] | None = None
    nodes: list[fx.Node] = []
    for node in [*graph.nodes]:
        if ops.is_unshard(node):
            continue
        is_code = node.op in ("call_function", "call_method") and not _is_collective(node)
        call = call_of(node) if is_code else None
        if call != current:
            if current is not None and len(nodes) >= MIN_NODES:
                yield Span(current[1], nodes)
            current, nodes = call, []
        nodes.append(node)


def call_of(node: fx.Node) -> tuple[str, str] | None:
    """Return which call of a sharded module a node belongs to, and the module's class; Dynamo numbers the calls."""
    stack = node.meta.get("nn_module_stack") or {}
    found = [(key, cls) for key, (_, cls) in stack.items() if getattr(cls, "_fxshard_unit", False)]
    return (found[-1][0], found[-1][1].__name__) if found else None


def _is_collective(node: fx.Node) -> bool:
    return node.op == "call_function" and any(name in str(node.target) for name in ("c10d", "_dtensor", "symm_mem"))


def _layout(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), str(value.dtype), str(value.device), value.requires_grad
