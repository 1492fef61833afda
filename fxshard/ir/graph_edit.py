"""Trace ordinary torch code and put its nodes into a graph.

[Note: replay]
A model has many equal units, and forward and backward gather the same. So what was traced once for a frame is kept
under a key of all that the code depends on besides its inputs. For equal inputs its nodes are copied and only run on
the new fake tensors. `make_fx` would trace the same, but prepares for much that such code does not do: it patches
modules, follows symbols and keeps tracebacks, which takes three times as long.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from fxshard import torch_private
from fxshard.errors import InvariantError
from fxshard.ir import collectives, ops, tags
from fxshard.ir.collectives import UnitSlot
from fxshard.ir.plan import FramePlan
from fxshard.ir.text import free_name


def add_parameter(
    graph: fx.Graph, plan: FramePlan, place: UnitSlot, tag: Literal["acc", "resident"], dtype: torch.dtype
) -> fx.Node:
    """Add a last input of the unsharded shape of the parameter at a place; `tag` begins its name."""
    key, (i, j) = place
    name = plan.parameter_name(key, i, j)
    before = graph.find_nodes(op="placeholder")
    with graph.inserting_after(before[-1]):
        node = graph.placeholder(f"{tag}_{name}".replace(".", "_").replace("'", "_"))
    mode = torch_private.fake_mode_of(graph)
    assert mode is not None, "a graph with parameters has tensors"
    with mode:
        tensors = [n for n in before if isinstance(n.meta.get("val"), Tensor)]
        devices = (n.meta["val"].device for n in tensors if not _is_offloaded(n, plan))
        offload = plan.units[key].offload
        device = next(devices, None if offload is None else torch.device(offload.device))
        assert device is not None, "a shard is on the device, or is copied there"
        node.meta["val"] = torch.empty(plan.units[key].shards[i].slots[j].shape, dtype=dtype, device=device)
    tags.tag(node, **{tag: name})
    return node


def _is_offloaded(placeholder: fx.Node, plan: FramePlan) -> bool:
    shard = tags.meta_of(placeholder).shard
    return shard is not None and plan.units[shard.unit].offload is not None


def reshapes_of(parameter: fx.Node) -> Iterator[fx.Node]:
    """Return `parameter` and every node that only casts, views or copies it."""
    queue = [parameter]
    while queue:
        node = queue.pop()
        yield node
        queue.extend(user for user in node.users if user.target in ops.MOVEMENT and user.all_input_nodes == [node])


def made_of(parameters: Iterable[fx.Node], beside: Collection[fx.Node]) -> set[fx.Node]:
    """Return every node that is made of `parameters` alone, or of these and what is `beside` them, or made of that."""
    made, known = set(parameters), set(beside)
    for node in next(iter(made)).graph.nodes if made else ():
        sources = node.all_input_nodes
        if sources and all(source in made or source in known for source in sources):
            (known if made.isdisjoint(sources) else made).add(node)
    return {node for node in made if node.op == "call_function"}


Decompositions = Mapping[Any, Callable[..., Any]]

TracedCode = dict[Hashable, fx.Graph]
"""Code that was traced for a frame, by its key and the layouts of its inputs; see [Note: replay]."""


class _Recorder(torch_private.DispatchMode):
    """Writes each op that runs in it into a graph."""

    def __init__(self, decompositions: Decompositions, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self._decompositions = fx.Graph(), decompositions
        self._made = {id(value): (value, self.graph.placeholder(f"input_{i}")) for i, value in enumerate(inputs)}
        self._original: Any = None

    def node_of(self, value: Tensor) -> fx.Node:
        return self._made[id(value)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, or what it decomposes into, and write it down."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func is torch.ops.aten.detach.default:  # Python's factories do it, as if there were a graph
            return self._keep(self.node_of(args[0]), func(*args, **kwargs))
        outer, self._original = self._original, self._original or func
        try:
            with self:
                parts = self._decompositions.get(func, func.decompose)(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            given, named = tree_map_only(Tensor, self.node_of, (args, kwargs))
            node = self.graph.create_node("call_function", func, given, named, name=func.overloadpacket.__name__)
            return self._keep(node, func(*args, **kwargs))
        finally:
            self._original = outer

    def _keep(self, node: fx.Node, result: Any) -> Any:
        node.meta.update(val=result, original_aten=self._original)
        parts = result if isinstance(result, list | tuple) else ()
        if isinstance(result, Tensor):
            self._made[id(result)] = result, node
        for i, part in enumerate(parts):
            self._keep(self.graph.call_function(operator.getitem, (node, i)), part)
        return result


class Splicer:
    """Puts code into one graph; see [Note: replay]."""

    def __init__(self, graph: fx.Graph, decompositions: Decompositions, traced: TracedCode) -> None:
        """Apply `decompositions` while tracing, so that new nodes have ops of the graph's kind."""
        self.graph, self.decompositions, self._traced = graph, decompositions, traced

    @functools.cached_property
    def _mode(self) -> Any:
        mode = torch_private.fake_mode_of(self.graph)
        if mode is None:
            raise InvariantError("the graph has no fake tensors: it was not traced by AOTAutograd.")
        return mode

    def insert(
        self, anchor: fx.Node, function: Callable[..., Sequence[Tensor]], inputs: Sequence[fx.Node], key: Hashable
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """Insert the nodes of `function(*inputs)` before `anchor`; return the nodes of its results, and all new nodes.

        Args:
            anchor: comes after all of `inputs` and all new nodes.
            function: plain torch code over tensors; may call collectives. A result may be an input.
            inputs: each with a fake tensor as `meta["val"]`.
            key: equal for functions that do the same with equal inputs.
        """
        values = [node.meta["val"] for node in inputs]
        known = (key, tuple((tuple(v.shape), v.stride(), v.dtype, v.device) for v in values))
        if any(isinstance(size, torch.SymInt) for v in values for size in (*v.shape, *v.stride())):
            return self._copy(self._trace(function, values), anchor, inputs, replayed=False)  # symbols have no hash
        replayed = known in self._traced
        if not replayed:
            self._traced[known] = self._trace(function, values)
        return self._copy(self._traced[known], anchor, inputs, replayed=replayed)

    def _trace(self, function: Callable[..., Sequence[Tensor]], values: Sequence[Tensor]) -> fx.Graph:
        with self._mode, torch.no_grad():
            inputs = [value.detach() for value in values]
            with _Recorder(self.decompositions, inputs) as recorder:
                results = function(*inputs)
        graph: fx.Graph = recorder.graph
        graph.output([recorder.node_of(result) for result in results])
        graph.eliminate_dead_code()
        return graph

    def _copy(
        self, traced: fx.Graph, anchor: fx.Node, inputs: Sequence[fx.Node], *, replayed: bool
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        copies: dict[fx.Node, fx.Node] = {}
        created: list[fx.Node] = []
        sources = iter(inputs)
        with self.graph.inserting_before(anchor):
            for node in traced.nodes:
                if node.op == "placeholder":
                    copies[node] = next(sources)
                elif node.op == "output":
                    return [copies[result] for result in node.args[0]], created
                else:
                    copies[node] = self.graph.node_copy(node, lambda n: copies[n])
                    created.append(copies[node])
                    if replayed:
                        self._run(copies[node])
        raise InvariantError("a traced graph had no output node.")

    def _run(self, node: fx.Node) -> None:
        """Give a replayed node a fake tensor of its own: two nodes with one would look like views of each other."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self._mode, torch.no_grad():
            node.meta = {**node.meta, "val": node.target(*args, **kwargs)}  # type: ignore[operator]
        node.meta.pop("tensor_meta", None)


def rename(node: fx.Node, name: str, taken: set[str]) -> None:
    """Name `node` by what it is, with a number if the name is in `taken`; add it there."""
    node.name = free_name(name, taken)  # torch's own renaming would not give back the name of a node that was erased
    taken.add(node.name)


def replace_launch(launch: fx.Node, target: torch._ops.OpOverload, arguments: tuple[Any, ...]) -> fx.Node:
    """Replace a launch by an op that returns a list; erase what it alone read; return the new node."""
    graph, value, name = launch.graph, launch.meta["val"], launch.name
    is_list = launch.target in collectives.COALESCED
    with graph.inserting_before(launch):
        made = graph.create_node("call_function", target, arguments, name=f"launch_{name}")
        made.meta = dict(launch.meta)
        result = made
        if not is_list:
            made.meta["val"] = [value]
            result = graph.call_function(operator.getitem, (made, 0))
            result.meta = {"val": value}
            if stream := tags.meta_of(launch).stream:
                tags.tag(result, stream=stream)
        launch.replace_all_uses_with(result)
    unread = launch.all_input_nodes
    graph.erase_node(launch)
    # Pins know the launch by its name.
    result.name = name
    while unread:
        node = unread.pop()
        if not node.users and node.op == "call_function" and node.target in ops.VIEWS | ops.CASTS | {ops.COPY}:
            unread += node.all_input_nodes
            graph.erase_node(node)
    return made
