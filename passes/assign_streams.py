"""Say which stream each copy and collective runs on, and where streams meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx import GraphModule

from fxshard.errors import ConfigError
from fxshard.ir import collectives, dataflow, graph_edit, launch_groups, launches, ops, tags
from fxshard.ir.dataflow import Dataflow
from fxshard.ir.launch_groups import LaunchGroup
from fxshard.ir.liveness import tensors_in
from fxshard.passes._base import GraphPass, PassContext, Property

MODES = ("auto", "nccl", "side", "off")

_aten = torch.ops.aten
_COPY_IN = ops.VIEWS | ops.COPIES | {_aten.cat.default, _aten._chunk_cat.default, _aten.constant_pad_nd.default}
"""What gradients go through besides casts on their way into the buffer of a reduction."""


@dataclass(frozen=True, kw_only=True)
class AssignStreams(GraphPass):
    """Run casts and copies of unsharded parameters and gradients beside the compute, or nothing beside it.

    Before   %s = cast(%shard)  %u = all_gather(%s)  compute  %w = wait(%u)  %p = copy of columns of %w
    After    %s = cast(%shard)  # stream=copy_in    %u = all_gather(%s)  # stream=copy_in
             %c = copy_out(%u)  # stream=copy_out   compute  %p = wait(%c)

    Attributes:
        mode: "nccl": collectives run on the streams of their process group, everything else on the main stream. "side":
            also the cast of a shard before its gather, the copies out of a gathered buffer, and the cast of gradients
            before their reduction, each on a stream of its own. "off": each launch is waited for at once, so that
            nothing overlaps; for debugging. "auto": "nccl", until "side" has been measured to be faster.

    A tag says where a node runs; `LowerStreams` turns tagged nodes into ops, right before there is code. A side stream
    begins with what the main one was given before, and meets it at a wait. Gradients are put together on the main
    stream, and then cast at once.

    Numerics: unchanged in the interpreter. What runs on a side stream is not fused with its neighbours any more, so
        compiled code may round sums otherwise.
    Memory: "side" keeps copies out of a buffer beside it from its launch on, not only while they are read; where a
        budget is set they stay where they were.
    No-op: "auto" and "nccl"; no launches. "side": nothing is cast or copied.
    Source: FSDP2 `_fsdp_param_group.py` (`all_gather_copy_in_stream`), `_fsdp_collectives.py` (`foreach_all_gather`).
    """

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    mode: str = "auto"
    fuses_copies: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"streams must be one of {', '.join(map(repr, MODES))}, got {self.mode!r}.")

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        gathers = launch_groups.groups_of(gm.graph, collectives.GATHERS)
        reductions = launch_groups.groups_of(gm.graph, collectives.REDUCTIONS)
        if self.mode == "off":
            outer = launch_groups.groups_of(gm.graph, collectives.ALL_REDUCES)
            copies = [node for node in gm.graph.nodes if node.target in ops.BETWEEN_HOST_AND_DEVICE]
            launched = [launch for group in (*gathers, *reductions, *outer) for launch in group.launches] + copies
            return any([_wait_at_once(launch) for launch in launched])
        if self.mode != "side":
            return False
        flow = dataflow.dataflow_of(gm.graph, ctx.plan)
        changed = [_tag_casts_before_gather(group, flow) for group in gathers]
        changed += [self._copy_out_beside_compute(group, ctx) for group in gathers]
        changed += [_cast_right_before_reduction(group) for group in reductions]
        return any(changed)

    def _copy_out_beside_compute(self, group: LaunchGroup, ctx: PassContext) -> bool:
        """Copy parameters out of a gathered buffer as soon as it is there, not when they are read."""
        wait_of = {copy: wait for wait in group.waits for copy in self._moved(wait)}
        if wait_of and ctx.unsharded_budget_bytes is not None:
            ctx.decline(group.launches[0], "memory budget: copied out where the parameters are read")
            return False
        place, names = group.nodes[-1], {}
        for copy, wait in wait_of.items():
            place = _launch_copy_out(copy, wait, place)
            names[place] = wait.name
        for wait in dict.fromkeys(wait_of.values()):
            _erase_unread(wait)
        taken = {node.name for node in place.graph.nodes}
        for copy_out, name in names.items():
            (wait,) = copy_out.users
            graph_edit.rename(copy_out, name.replace("wait_", "copied_", 1), taken)
            graph_edit.rename(wait, name, taken)
        return bool(wait_of)

    def _moved(self, wait: fx.Node) -> list[fx.Node]:
        """Return the copies out of a buffer that go to a side stream: all or none, for one stream waits for it."""
        copies = _copies_out(wait)
        return copies if not self.fuses_copies or any(map(launches.is_read_by_a_library, copies)) else []


def _wait_at_once(launch: fx.Node) -> bool:
    moved, results = False, list(launch.users) if launch.target in collectives.COALESCED else [launch]
    place = max(results)  # nodes compare by their place in the graph
    for wait in sorted(wait for result in results for wait in result.users):
        if place.next is not wait:
            place.append(wait)
            moved = True
        place = wait
    return moved


# ---- gathers


def _tag_casts_before_gather(group: LaunchGroup, flow: Dataflow) -> bool:
    tagged: set[fx.Node] = set()
    for node in group.nodes:
        is_cast_of_shard = node.target in ops.CASTS and node in flow.values
        if is_cast_of_shard or not tagged.isdisjoint(node.all_input_nodes):
            tags.tag(node, stream=tags.COPY_IN)
            tagged.add(node)
    return bool(tagged)


def _copies_out(wait: fx.Node) -> list[fx.Node]:
    """Return the copies out of a gathered buffer, if it is read by nothing but copies of it."""
    copies, pending = [], list(wait.users)
    while pending:
        node = pending.pop(0)
        if node.target in ops.COPIES:
            copies.append(node)
        elif node.target in ops.VIEWS and not tags.meta_of(node).param:
            pending += node.users
        else:
            return []
    return copies


def _launch_copy_out(copy: fx.Node, wait: fx.Node, place: fx.Node) -> fx.Node:
    """Put a copy on its stream behind `place`, and the wait for it where it was; return the former."""
    (buffer,), (source,) = wait.all_input_nodes, copy.all_input_nodes
    (part,), graph = tensors_in(source), copy.graph
    arguments = (buffer, list(part.shape), list(part.stride()), part.storage_offset(), tags.COPY_OUT)
    with graph.inserting_after(place):
        copy_out = graph.call_function(ops.COPY_OUT, arguments)
    copy_out.meta = dict(copy.meta)
    copy_out.meta[tags.KEY] = tags.meta_of(wait)
    tags.tag(copy_out, stream=tags.COPY_OUT)
    with graph.inserting_before(copy):
        parameter = graph.call_function(collectives.WAIT, (copy_out,))
    parameter.meta = dict(copy.meta)
    parameter.meta[tags.KEY] = tags.meta_of(copy) | tags.meta_of(wait)
    copy.replace_all_uses_with(parameter)
    graph.erase_node(copy)
    return copy_out


def _erase_unread(node: fx.Node) -> None:
    for user in list(node.users):
        _erase_unread(user)
    if not node.users and node.target in ops.VIEWS | {collectives.WAIT}:
        node.graph.erase_node(node)


# ---- reductions


def _cast_right_before_reduction(group: LaunchGroup) -> bool:
    """Cast what a reduction sends once and last, on the reduce stream, where gradients were cast one by one."""
    changed = False
    for launch in group.launches:
        sent = dict.fromkeys(node for node in collectives.launch_inputs(launch) if node is not None)
        casts = [_cast_last(node, copy_in, launch) for node in sent if (copy_in := _copy_in_from_casts(node))]
        results = launch.users if launch.target in collectives.COALESCED else ()
        for node in (*casts, launch, *results) if casts else ():
            tags.tag(node, stream=tags.REDUCE)
        changed = changed or bool(casts)
    return changed


def _copy_in_from_casts(sent: fx.Node) -> list[fx.Node]:
    """Return the casts that a sent buffer is made of and all copy-in behind them; nothing if it is of more."""
    found: set[fx.Node] = set()
    pending = [sent]
    while pending:
        node = pending.pop()
        is_gradient = tags.meta_of(node).grads  # compute's, not ours to move
        if is_gradient or len(node.users) != 1 or node.target not in ops.CASTS | _COPY_IN:
            return []
        found.add(node)
        pending += node.all_input_nodes if node.target not in ops.CASTS else ()
    sources = {node.all_input_nodes[0].meta["val"].dtype for node in found if node.target in ops.CASTS}
    return sorted(found) if len(sources) == 1 else []  # nodes compare by their place in the graph


def _cast_last(sent: fx.Node, copy_in: list[fx.Node], launch: fx.Node) -> fx.Node:
    """Copy in what was cast, and cast the buffer; return its cast."""
    graph, cast = launch.graph, next(node for node in copy_in if node.target in ops.CASTS)
    uncast: dict[fx.Node, fx.Node] = {}
    for node in copy_in:
        if node.target in ops.CASTS:
            uncast[node] = node.all_input_nodes[0]
            continue
        with graph.inserting_before(node):
            uncast[node] = graph.node_copy(node, lambda source: uncast[source])
        dtype = uncast[node.all_input_nodes[0]].meta["val"].dtype
        uncast[node].meta = node.meta | {"val": node.meta["val"].to(dtype)}
    with graph.inserting_before(launch):
        cast_last = graph.call_function(cast.target, (uncast[sent], *cast.args[1:]), dict(cast.kwargs))  # type: ignore[arg-type]
    cast_last.meta = sent.meta | {"val": sent.meta["val"].clone()}
    launch.replace_input_with(sent, cast_last)
    for node in reversed(copy_in):
        graph.erase_node(node)
    return cast_last
