"""What mutators are made of: finding places in a graph, and breaking it there."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxshard import torch_private
from fxshard.ir import collectives, ops, signature, tags

aten = torch.ops.aten

Edit = tuple[fx.Node, Callable[[], object]]
"""Where a mutator would break the graph, and what does it."""

Mutator = Callable[[fx.Graph], Iterator[Edit]]
"""Finds every place of a graph at which it applies; breaks it at the one that is called."""

DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
CONCATS = (aten._chunk_cat.default, aten.cat.default)
GATHERS = (collectives.ALL_GATHER, collectives.ALL_GATHER_COALESCED)


# ---- places


def nodes_of(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    """The calls of any of `targets`, in program order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def launch_nodes(graph: fx.Graph) -> list[fx.Node]:
    return nodes_of(graph, *collectives.LAUNCHES)


def waits(graph: fx.Graph) -> list[fx.Node]:
    return nodes_of(graph, collectives.WAIT)


def parameters(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that are an unsharded parameter."""
    return [node for node in graph.nodes if tags.meta_of(node).param and node.op == "call_function"]


def slices(graph: fx.Graph) -> list[fx.Node]:
    """The slots that are cut out of gathered buffers."""
    found = dict.fromkeys(node for parameter in parameters(graph) for node in chain_of(parameter))
    return [node for node in found if node.target == aten.slice.Tensor]


def chain_of(parameter: fx.Node) -> list[fx.Node]:
    """A parameter and what it was made of, back to the wait."""
    chain = [parameter]
    while chain[-1].op == "call_function" and chain[-1].target != collectives.WAIT and chain[-1].all_input_nodes:
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def gradient_concats(graph: fx.Graph) -> list[fx.Node]:
    """Where gradients are put side by side for a reduction, of two rows or more."""
    found = [n for n in nodes_of(graph, *CONCATS) if any(leads_to_reduction(user) for user in n.users)]
    return [node for node in found if len(list_of(node)) > 1]


def leads_to_reduction(node: fx.Node) -> bool:
    """Whether a node only passes a buffer on to a launch."""
    while node.target not in collectives.REDUCTIONS:
        if node.target not in (aten.view.default, aten.div.Tensor) or len(node.users) != 1:
            return False
        (node,) = node.users
    return True


def gradient_sums(graph: fx.Graph) -> list[fx.Node]:
    """Sums of the gradients of several reads."""
    return [n for n in nodes_of(graph, aten.add.Tensor) if n.args and all(is_gradient(a) for a in n.args)]


def is_gradient(value: Any) -> bool:
    """Whether a value is a gradient, or a sum of such."""
    if not isinstance(value, fx.Node):
        return False
    is_sum = value.target == aten.add.Tensor and all(is_gradient(a) for a in value.args)
    return bool(tags.meta_of(value).grads) or is_sum


def markers(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if ops.is_unshard(node) or ops.is_reduce_grad(node)]


def list_of(node: fx.Node) -> list[Any]:
    """The members that a concat puts side by side."""
    members = node.args[0]
    assert isinstance(members, list | tuple)
    return list(members)


def alike(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of one shape and dtype."""
    for one, other in itertools.combinations(nodes, 2):
        if signature.type_of(one) == signature.type_of(other):
            yield one, other


def compute_readers(parameter: fx.Node) -> list[fx.Node]:
    return [user for user in parameter.users if user.op == "call_function"]


def index_of(launch: fx.Node, argument: str) -> int:
    """Which argument of a launch has this name."""
    return list(collectives.arguments_of(launch)).index(argument)


# ---- edits


def insert(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call in front of a node, with the fake value that running it gives."""
    graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    mode = torch_private.fake_mode_of(graph)
    values = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    try:
        with mode or torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
        pass  # what cannot run has no value; that is for the verifier to find
    return node


def insert_like(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call right behind a node that claims to be what the node is."""
    node = insert(like.next, target, *args, **kwargs)
    node.meta["val"] = like.meta.get("val")
    return node


def copy_of(node: fx.Node) -> fx.Node:
    """The same call again, right behind it."""
    with node.graph.inserting_after(node):
        return node.graph.node_copy(node)


def set_argument(node: fx.Node, index: int, value: Any) -> None:
    node.update_arg(index, value)


def read_instead(reader: fx.Node, old: fx.Node, new: fx.Node) -> None:
    reader.replace_input_with(old, new)


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let all readers but the new node itself read the new node, and drop what nothing reads any more."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    drop(old)


def drop(node: fx.Node) -> None:
    """Erase a node that nothing reads, and what only it read."""
    if node.users or node.op != "call_function":
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for source in inputs:
        drop(source)


def swap_readers(one: fx.Node, other: fx.Node) -> None:
    """Let each node be read where the other one was."""
    of_one, of_other = list(one.users), list(other.users)
    for reader in dict.fromkeys((*of_one, *of_other)):
        reader.args, reader.kwargs = fx.map_arg(
            (reader.args, reader.kwargs), lambda node: {one: other, other: one}.get(node, node)
        )
    settle(one.graph)


def settle(graph: fx.Graph) -> None:
    """Move every node behind what it reads, so that the order alone does not give the mutant away."""
    placed: set[fx.Node] = set()

    def place(node: fx.Node) -> None:
        placed.add(node)
        for source in node.all_input_nodes:
            if source not in placed:
                place(source)
        graph.output_node().prepend(node)

    for node in list(graph.nodes):
        if node not in placed and node.op != "output":
            place(node)


def swap_arguments(one: fx.Node, other: fx.Node, index: int = 0) -> None:
    first, second = one.args[index], other.args[index]
    set_argument(one, index, second)
    set_argument(other, index, first)
    settle(one.graph)


def set_results(graph: fx.Graph, results: Sequence[Any]) -> None:
    graph.output_node().args = (tuple(results),)


def edit(function: Callable[..., object], *args: Any) -> Callable[[], object]:
    """Do it later."""
    return functools.partial(function, *args)
