"""How many units ahead each all_gather is launched: as many as it takes to hide it, and no more."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxshard.cost.timeline import Timeline
from fxshard.ir.launch_groups import Hoist, LaunchGroup
from fxshard.ir.memory_budget import MemoryBudget

_NOTHING = 1e-6
"""Seconds of exposed communication that are not worth a further unit."""


def depths_that_hide(
    groups: Sequence[LaunchGroup], needed_at: Sequence[fx.Node], timeline: Timeline, budget: MemoryBudget
) -> list[int]:
    """For each launch group the smallest depth that hides it, or as much of it as any depth and the budget do.

    One after the other, by list scheduling: a group is launched one unit earlier as long as compute waits for it, and
    as the link does something else right before it than the group before. Later groups count as one ahead until it is
    their turn. At depth 0 a group, or a later one, is launched before its node of `needed_at`. Depths that are found
    are reserved in `budget`.
    """
    hoist = Hoist(groups, budget)
    depths = [min(k, 1) for k in range(len(groups))]

    def place_of(k: int) -> fx.Node:
        return hoist.earliest(groups[k], needed_at[k - depths[k]])[0]

    moved: dict[fx.Node, fx.Node] = {}

    def launch_before(place: fx.Node, k: int) -> None:
        for node in groups[k].nodes:  # the launches, and copies of offloaded shards that come along
            if node in timeline.needs:
                moved[node] = min(node, place)  # what stands earlier stays: nodes compare by their place in the graph

    for k in range(len(groups)):
        launch_before(place_of(k), k)
    for k, group in enumerate(groups):
        exposed: dict[int, float] = {}  # depth -> seconds
        while True:
            place = place_of(k)
            launch_before(place, k)
            transfers = timeline.run(moved).transfers
            exposed[depths[k]] = sum(transfers[launch].exposed for launch in group.launches)
            is_hidden = exposed[depths[k]] < _NOTHING
            follows = k > 0 and transfers[group.launches[0]].behind in groups[k - 1].launches
            is_limited = depths[k] == k or place != needed_at[k - depths[k]]
            if is_hidden or follows or is_limited:
                break
            depths[k] += 1
        depths[k] = min(exposed, key=lambda depth: (round(exposed[depth], 6), depth))
        place = place_of(k)
        launch_before(place, k)
        hoist.launch(group, place)
    return depths
