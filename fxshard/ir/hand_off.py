"""Let the first and the last launch of a graph reach over its ends: `fxshard::open` in their place."""

from __future__ import annotations

from torch import fx

from fxshard.ir import collectives, dataflow, launch_groups, launches, ops, side_streams, tags
from fxshard.ir.dataflow import Dataflow, Flat
from fxshard.ir.plan import FramePlan


def hand_off(graph: fx.Graph, plan: FramePlan, *, guess: bool, hands_over: bool = True) -> None:
    """Replace the launches of the first and of the last launch group; see [Note: prefetch cache].

    Args:
        graph: about to become code.
        plan: of its frame.
        guess: whether to launch what came next the last time where no list says what to launch.
        hands_over: whether to launch anything for the next graph.
    """
    groups = launch_groups.groups_of(graph, collectives.GATHERS)
    if not groups:
        return
    found = dataflow.dataflow_of(graph, plan)
    shards = {tags.tags_of(node).get(tags.SHARD): node for node in graph.find_nodes(op="placeholder")}
    roles = [(groups[0], "only" if len(groups) == 1 and hands_over else "first")]
    if guess and hands_over and len(groups) > 1:
        roles.append((groups[-1], "last"))
    for group, role in roles:
        for launch in group.launches:
            sent = _sent(launch, found)
            flat = shards.get(f"{sent[0].unit}#{sent[0].shard}") if sent else None
            if flat is not None:
                _replace(launch, flat, sent, role, guess)


def _sent(launch: fx.Node, found: Dataflow) -> list[Flat]:
    """The stretches of one flat that a launch sends; none if it sends anything else."""
    values = [found.values.get(node) if node is not None else None for node in collectives.launch_inputs(launch)]
    flats = [value for value in values if isinstance(value, Flat)]
    same = len({(flat.unit, flat.shard, flat.dtype) for flat in flats}) == 1
    return flats if same and len(flats) == len(values) else []


def _replace(launch: fx.Node, flat: fx.Node, sent: list[Flat], role: str, guess: bool) -> None:
    starts, numels = [part.start for part in sent], [part.numel for part in sent]
    ranks = collectives.world_size_of(launch), collectives.group_of(launch)
    stream = tags.tags_of(launch).get(tags.STREAM, "")
    opened = side_streams.replace(launch, ops.OPEN, (flat, sent[0].dtype, starts, numels, *ranks, role, guess, stream))
    following = opened.next
    while following.op != "output" and following.target not in collectives.LAUNCHES:
        following = following.next
    if following.op != "output":  # Inductor keeps the order of the collectives that it knows, and this is none
        launches.pin(following, opened)
