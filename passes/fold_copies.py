"""Let a region take its parameters out of gathered buffers itself, and put its gradients into the buffer to send."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule

from fxshard.ir import collectives, graph_edit, ops, regions, tags
from fxshard.passes._base import GraphPass, PassContext, Property

_aten = torch.ops.aten
_INTO_A_BUFFER = ops.MOVEMENT | {
    _aten._chunk_cat.default,
    _aten.cat.default,
    _aten.constant_pad_nd.default,
    _aten.div.Tensor,
    _aten.div.Scalar,
    _aten.mul.Tensor,
    _aten.mul.Scalar,
}


@dataclass(frozen=True, kw_only=True)
class FoldCopies(GraphPass):
    """Move the copies between collectives and the calls of a region into the region, which is lowered once.

    Before   %w = clone(slice(%gathered))  %y = invoke_subgraph(Block, %x, %w)
             %g = invoke_subgraph(Block_backward, ...)  %sent = cat(%g[0], %g[1])  reduce_scatter(%sent)
    After    %y = invoke_subgraph(Block_with_copies, %x, %gathered)
             %g = invoke_subgraph(Block_backward_with_copies, ...)  reduce_scatter(%g[0])

    What moves: views, copies and casts of a buffer that was waited for, where the call alone reads them; and what
    makes a buffer to reduce of nothing but the results of one call.

    Numerics: unchanged, up to what Inductor fuses. Memory: a gathered buffer lives until its region has run.
    No-op: a graph without regions; one rank, which copies nothing.
    Limits: copies on a side stream stay, and those of a call that is like no other, which get a remark.
    Source: the copy-out and copy-in of FSDP2's `_fsdp_collectives.py`, done by the compiled block.
    """

    requires = frozenset({Property.COLLECTIVES, Property.LOWERED})

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        groups: dict[tuple[str, ...], list[_FoldedCall]] = defaultdict(list)
        for call in _calls(gm.graph):
            groups[call.text()].append(call)
        changed = False
        for calls in groups.values():
            if len(calls) < 2:
                ctx.decline(calls[0].node, "its copies are like those of no other call, and stay outside")
                continue
            name = regions.add_code(gm, f"{calls[0].node.args[1]}_with_copies", calls[0].code())
            for call in calls:
                call.replace_by(name)
            changed = True
        return changed


@dataclass(eq=False)
class _FoldedCall:
    """A call of a region, and what may move into it."""

    node: fx.Node
    before: list[fx.Node]  # copies out of gathered buffers, in order
    after: list[fx.Node]  # what makes buffers to reduce, in order
    sent: list[fx.Node]  # those buffers

    @property
    def given(self) -> list[fx.Node]:
        return regions.operands_of(self.node)

    @property
    def operands(self) -> list[fx.Node]:
        inside = set(self.before)
        read = [*self.given, *(source for node in self.before for source in node.all_input_nodes)]
        return [node for node in dict.fromkeys(read) if node not in inside]

    @property
    def kept(self) -> list[fx.Node]:
        inside = set(self.after)
        found = [read for read in self.node.users if any(user not in inside for user in read.users)]
        return sorted(found, key=lambda read: int(read.args[1]))  # type: ignore[arg-type]

    def text(self) -> tuple[str, ...]:
        """Return what is equal for calls that can share one graph."""
        place = {node: f"%{i}" for i, node in enumerate([*self.operands, *self.before])}
        place |= {read: f"result {read.args[1]}" for read in self.node.users}
        place |= {node: f"made {i}" for i, node in enumerate(self.after)}
        named = place.__getitem__
        lines = [repr(regions.layout_of(node)) for node in self.operands]
        lines += [f"{n.target} {fx.map_arg((n.args, n.kwargs), named)}" for n in (*self.before, *self.after)]
        ends = (repr(list(map(named, nodes))) for nodes in (self.given, self.kept, self.sent))
        return (str(self.node.args[1]), *lines, *ends)

    def code(self) -> GraphModule:
        old = regions.code_of(self.node)
        assert old is not None
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for i, operand in enumerate(self.operands):
            env[operand] = graph.placeholder(f"{'gathered' if collectives.is_wait(operand) else 'operand'}_{i}")
            env[operand].meta["val"] = operand.meta["val"]
        for node in self.before:
            env[node] = _copied(graph, node, env)
        inputs = old.graph.find_nodes(op="placeholder")
        results: Any = graph.graph_copy(old.graph, dict(zip(inputs, map(env.__getitem__, self.given), strict=True)))
        env |= {read: results[read.args[1]] for read in self.node.users}
        for node in self.after:
            env[node] = _copied(graph, node, env)
        graph.output(tuple(env[node] for node in (*self.kept, *self.sent)))
        taken = {node.name for node in graph.nodes}
        for node in self.before:
            if fqn := tags.meta_of(node).param:
                graph_edit.rename(env[node], self._in_unit(fqn).replace(".", "_"), taken)
        return GraphModule(old, graph)

    def _in_unit(self, fqn: str) -> str:
        units = (unit for node in self.operands for unit in tags.units_of(node))
        return next((fqn.removeprefix(f"{unit}.") for unit in units if fqn.startswith(f"{unit}.")), fqn)

    def replace_by(self, name: str) -> None:
        graph, old, results = self.node.graph, self.node.args[0], [*self.kept, *self.sent]
        with graph.inserting_before(self.node):
            call = graph.call_function(regions.INVOKE, (graph.get_attr(name), name, *self.operands))
            call.meta = {key: value for key, value in self.node.meta.items() if key != "eager_input_vals"}
            call.meta["val"] = tuple(result.meta["val"] for result in results)
            reads = [graph.call_function(operator.getitem, (call, i)) for i in range(len(results))]
        for read, result in zip(reads, results, strict=True):
            read.meta = dict(result.meta)
            result.replace_all_uses_with(read)
        names = [result.name for result in results]
        for node in reversed([*self.before, self.node, *self.node.users, *self.after]):
            graph.erase_node(node)
        for read, name in zip(reads, names, strict=True):
            read.name = name  # backward knows what was saved by its name
        if isinstance(old, fx.Node) and not old.users:
            graph.erase_node(old)


def _calls(graph: fx.Graph) -> Iterator[_FoldedCall]:
    before, (after, sent) = _copies_out(graph), _copies_in(graph)
    for node in graph.find_nodes(op="call_function", target=regions.INVOKE):
        if node in before or node in sent:
            yield _FoldedCall(node, before.get(node, []), after.get(node, []), sent.get(node, []))


def _copies_out(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Map a call -> the nodes between waits and it that nothing else reads, in order."""
    moves: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes if node.target in ops.MOVEMENT and not _is_elsewhere(node) else []
        if len(sources) == 1 and (
            sources[0] in moves or (collectives.is_wait(sources[0]) and tags.units_of(sources[0]))
        ):
            moves.add(node)
    owner: dict[fx.Node, fx.Node] = {}
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in reversed(graph.nodes):
        readers = {user if user.target is regions.INVOKE else owner.get(user) for user in node.users}
        if node in moves and len(readers) == 1 and (call := readers.pop()) is not None:
            owner[node] = call
            found[call].insert(0, node)
    return found


def _copies_in(graph: fx.Graph) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, list[fx.Node]]]:
    """Map a call -> what makes buffers to reduce of its results alone, in order; and -> those buffers."""
    origin: dict[fx.Node, fx.Node] = {}  # what is made of the results of one call -> the call
    after: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    sent: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        sources = {origin.get(source) for source in node.all_input_nodes}
        if node.target is operator.getitem and node.args[0].target is regions.INVOKE:
            origin[node] = node.args[0]
        elif node.target in _INTO_A_BUFFER and len(sources) == 1 and None not in sources and not _is_elsewhere(node):
            origin[node] = next(filter(None, sources))
        elif node.target in collectives.REDUCTIONS and tags.units_of(node):
            for buffer in filter(None, collectives.launch_inputs(node)):
                made = _made(buffer, node)
                if made and buffer in origin and made <= origin.keys():
                    after[origin[buffer]] += sorted(made)
                    sent[origin[buffer]].append(buffer)
    return after, sent


def _made(buffer: fx.Node, launch: fx.Node) -> set[fx.Node]:
    """Return what is made for a buffer to send, up to the results of calls; nothing if others read a part of it.

    Nor if they read one of the results: what is made may be a view of it, and results of a call share no memory.
    """
    made: set[fx.Node] = set()
    todo = [buffer]
    while todo:
        node = todo.pop()
        if node not in made and node.target in _INTO_A_BUFFER:
            made.add(node)
            todo += node.all_input_nodes
    read = made.union(*(node.all_input_nodes for node in made))
    readers = {user for node in read for user in node.users} - made
    return made if readers == {launch} else set()


def _is_elsewhere(node: fx.Node) -> bool:
    """Whether a node has a stream, or a place of its own."""
    meta = tags.meta_of(node)
    return bool(meta.stream or meta.after)


def _copied(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node, without what differs from call to call: whose parameter it is."""
    copy = graph.node_copy(node, env.__getitem__)
    copy.meta.pop(tags.KEY, None)
    return copy
