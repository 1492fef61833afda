"""Move collectives in a graph: which launches stand together, what goes with them, and where they may go.

[Note: launch groups]
A *launch group* is what is launched for one unit, or for one bucket of units, with no launch for others between: the
launches of the two dtypes of a unit, or the pieces of one that was split. A launch that serves several units belongs to
the first of them: were it to tie their groups together, a row of units would be one group, all gathered at once. With a
launch go the nodes that prepare what it sends (casts, slices, a concat) and the ones that pick its results. A wait
never moves before its launch, a launch never before what it reads.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxshard.ir import collectives, liveness, ops, tags
from fxshard.ir.memory_budget import MemoryBudget


@dataclass(eq=False, kw_only=True)
class LaunchGroup:
    """Launches whose first unit is the same, one after the other, in program order; see [Note: launch groups]."""

    launches: list[fx.Node]
    nodes: list[fx.Node]  # `launches` and what goes with them; they move together
    waits: list[fx.Node]

    @property
    def units(self) -> dict[str, str]:
        """The units that it serves -> which call of each."""
        return {unit: call for launch in self.launches for unit, call in tags.units_of(launch).items()}

    @property
    def name(self) -> str:
        """The units in words."""
        return ", ".join(unit or "root" for unit in self.units)

    @property
    def fills(self) -> list[fx.Node]:
        """What fills buffers of unsharded parameters: its launches, and the copies of shards that come along."""
        return [node for node in self.nodes if node in self.launches or node.target is ops.COPY_TO_DEVICE]

    @property
    def inputs(self) -> set[fx.Node]:
        """What its nodes read of others."""
        return {source for node in self.nodes for source in node.all_input_nodes} - set(self.nodes)


def groups_of(graph: fx.Graph, targets: Collection[object]) -> list[LaunchGroup]:
    """Return the groups of launches that passes inserted, in their order: `GATHERS`, `REDUCTIONS` or `ALL_REDUCES`."""
    launches = tags.launches_of(graph, targets)
    return [
        group_of(*served)
        for _, served in itertools.groupby(launches, key=lambda launch: next(iter(tags.units_of(launch).items())))
    ]


def group_of(*launches: fx.Node) -> LaunchGroup:
    """Return launches as one group, with what goes with them and their waits."""
    results = [
        result
        for launch in launches
        for result in (launch.users if launch.target in collectives.COALESCED else (launch,))
    ]
    waits = [wait for result in results for wait in result.users]
    nodes = {*launches, *results, *_prepared_for(launches)}
    return LaunchGroup(launches=[*launches], nodes=sorted(nodes), waits=sorted(waits))  # by their place in the graph


def waited_for(wait: fx.Node) -> fx.Node:
    """Return the launch whose result a node waits for."""
    (result,) = wait.all_input_nodes
    return result.all_input_nodes[0] if result.target is operator.getitem else result


def launched_bytes(launch: fx.Node) -> int:
    """Return the bytes of the buffers that a launch fills."""
    return sum(liveness.hint_of(tensor.untyped_storage().nbytes()) for tensor in liveness.tensors_in(launch))


def _prepared_for(launches: Sequence[fx.Node]) -> set[fx.Node]:
    """Return what is computed for `launches` alone, between them and shards, parameters or gradients."""
    found: set[fx.Node] = set()
    pending = sorted({source for launch in launches for source in launch.all_input_nodes})
    while pending:
        node = pending.pop()  # the last one: its readers are known by now
        alone = all(user in launches or user in found for user in node.users)
        meta = tags.meta_of(node)
        is_compute = node.op == "call_function" and not collectives.is_wait(node)  # what was launched stays where it is
        is_compute |= ops.copy_to_device_behind(node) is not None  # but a copy of a shard comes along
        if is_compute and alone and not (meta.grads or meta.param):
            found.add(node)
            pending = sorted({*pending, *node.all_input_nodes})
    return found


def last_input(graph: fx.Graph) -> fx.Node:
    """Return the last of the graph's inputs."""
    last: fx.Node = max(graph.find_nodes(op="placeholder"))  # nodes compare by their place in the graph
    return last


def following(node: fx.Node, moving: Collection[fx.Node] = ()) -> fx.Node:
    """Return the first node behind `node` that is no input and not in `moving`."""
    place = node.next
    while place.op == "placeholder" or place in moving:
        place = place.next
    return place


def move(places: Mapping[fx.Node, fx.Node]) -> None:
    """Put each node right before the one that it is mapped to; several at one place keep the order of `places`."""
    for node, place in places.items():
        place.prepend(node)


class Hoist:
    """Launch groups on their way up a graph: how far each can go. Nothing moves before `move`."""

    def __init__(self, groups: Sequence[LaunchGroup], budget: MemoryBudget) -> None:
        """Reserve `budget` from where a group is launched to where it is launched now."""
        self.budget = budget
        self.moving = frozenset(node for group in groups for node in group.nodes)
        self.places: dict[fx.Node, fx.Node] = {}

    def following(self, node: fx.Node) -> fx.Node:
        """Return the first node behind `node` that stays where it is."""
        return following(node, self.moving)

    def earliest(self, group: LaunchGroup, wanted: fx.Node) -> tuple[fx.Node, list[str]]:
        """Return the first node, from `wanted` on, before which a group can be launched, and why none earlier."""
        place, limits = wanted, []
        if (latest := max(group.inputs)) >= place:  # nodes compare by their place in the graph
            place = self.following(latest)
            limits.append(f"it reads %{latest.name}")
        nbytes = 0  # of what has come up to here
        behind = [node for node in group.fills if node > place]
        for before, node in reversed([*itertools.pairwise([place, *behind])]):
            nbytes += launched_bytes(node)
            free = self.budget.earliest(before, node, nbytes)
            if free != before:
                return self.following(free.prev), [*limits, self.budget.full_before(free, nbytes)]
        return place, limits

    def launch(self, group: LaunchGroup, place: fx.Node) -> None:
        """Launch right before `place` what of a group is launched later now."""
        for node in group.fills:
            if node > place:
                self.budget.reserve(place, node, launched_bytes(node))
        self.places |= dict.fromkeys((node for node in group.nodes if node > place), place)

    def move(self) -> None:
        """Move the groups to where they are launched; several at one place in the order of the `launch` calls."""
        move(self.places)
