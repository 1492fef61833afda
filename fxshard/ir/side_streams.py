"""Turn what is tagged with a stream into the ops that run there; see [Note: side streams] in `runtime/streams.py`.

As with pins (`launches.py`), graphs stay as they are to read, to verify and to estimate: a tagged cast is a cast, a
tagged launch a launch. Only right before a graph becomes code, a launch and the casts before it become one op.
"""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch
from torch import Tensor, fx

from fxshard.ir import collectives, dataflow, ops, tags
from fxshard.ir.dataflow import Dataflow, Flat
from fxshard.ir.plan import FramePlan

_log = logging.getLogger(__name__)

COPY_IN, COPY_OUT, REDUCE = "copy_in", "copy_out", "reduce"
"""Names of the streams: before a gather, after it, and before a reduction."""


def move(graph: fx.Graph, plan: FramePlan) -> None:
    """Replace the tagged launches of a graph that is about to become code."""
    found = dataflow.dataflow_of(graph, plan)
    shards = {tags.tags_of(node).get(tags.SHARD): node for node in graph.find_nodes(op="placeholder")}
    for launch in [node for node in graph.nodes if node.target in collectives.LAUNCHES]:
        stream = tags.tags_of(launch).get(tags.STREAM)
        if stream is not None and launch.target in collectives.GATHERS:
            _move_gather(launch, found, shards, stream)
        elif stream is not None:
            _move_reduction(launch, stream)


def _move_gather(launch: fx.Node, found: Dataflow, shards: dict[str | None, fx.Node], stream: str) -> None:
    values = [found.values.get(node) if node is not None else None for node in collectives.launch_inputs(launch)]
    flats = [value for value in values if isinstance(value, Flat)]
    if len(flats) < len(values):
        _log.warning("fxshard: Inductor rewrote the cast before %s; it stays on the main stream.", launch.name)
        return
    with launch.graph.inserting_before(launch):
        parts = [_part(shards[f"{flat.unit}#{flat.shard}"], flat) for flat in flats]
    ranks = collectives.world_size_of(launch), collectives.group_of(launch)
    replace(launch, ops.GATHER_ASIDE, (parts, flats[0].dtype, *ranks, stream))


def _part(shard: fx.Node, flat: Flat) -> fx.Node:
    """The elements of a shard that a launch sends, not cast yet."""
    whole: Tensor = shard.meta["val"]
    if (flat.start, flat.numel) == (0, whole.numel()):
        return shard
    part = shard.graph.call_function(torch.ops.aten.slice.Tensor, (shard, 0, flat.start, flat.start + flat.numel))
    part.meta["val"] = whole[flat.start : flat.start + flat.numel]
    return part


def _move_reduction(launch: fx.Node, stream: str) -> None:
    sent = [node for node in collectives.launch_inputs(launch) if node is not None]
    dtype = sent[0].meta["val"].dtype
    is_cast = {node: node.target in ops.CASTS and tags.STREAM in tags.tags_of(node) for node in sent}
    inputs = [node.all_input_nodes[0] if is_cast[node] else node for node in sent]
    ranks = collectives.world_size_of(launch), collectives.group_of(launch)
    replace(launch, ops.REDUCE_ASIDE, (inputs, dtype, *ranks, stream))


def replace(launch: fx.Node, target: torch._ops.OpOverload, arguments: tuple[Any, ...]) -> fx.Node:
    """Put an op that returns a list in the place of a launch, coalesced or not; what it read alone goes.

    Returns:
        The new node. Where the launch was one tensor, its only result has the launch's name: pins know it by that.
    """
    graph, value, name = launch.graph, launch.meta["val"], launch.name
    is_list = launch.target in collectives.COALESCED
    with graph.inserting_before(launch):
        made = graph.call_function(target, arguments)
        made.meta = dict(launch.meta)
        result = made
        if not is_list:
            made.meta["val"] = [value]
            result = graph.call_function(operator.getitem, (made, 0))
            result.meta = {"val": value}
        launch.replace_all_uses_with(result)
    unread = launch.all_input_nodes
    graph.erase_node(launch)
    if not is_list:
        result.name = name
    while unread:
        node = unread.pop()
        if not node.users and node.op == "call_function" and node.target in ops.VIEWS | ops.CASTS:
            unread += node.all_input_nodes
            graph.erase_node(node)
    return made
