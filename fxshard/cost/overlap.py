"""How long compute would stand at each wait if launches stood elsewhere: the clock of `simulate.py`, without the graph.

A schedule is tried hundreds of times, so a graph is reduced to its *track*: the compute before each node, added up, and
what is launched and waited for where. Times are seconds at the world size and shapes that the graph was traced with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxshard.cost.comm import Launch, launches_of
from fxshard.cost.compute import FREE, ComputeModel
from fxshard.cost.hardware import HardwareSpec
from fxshard.cost.sizes import sizes_of
from fxshard.ir import collectives
from fxshard.ir.plan import FramePlan


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One launch on its queue.

    Attributes:
        start: when the queue takes it up; seconds since the graph began.
        behind: the launch that the queue did right before, `None` if it stood idle.
        exposed: how long compute stood at its waits.
    """

    start: float
    behind: fx.Node | None
    exposed: float


class Track:
    """A graph on the clock, to be asked again and again."""

    def __init__(self, graph: fx.Graph, plan: FramePlan, hardware: HardwareSpec) -> None:
        """Cost every node of `graph` once."""
        sizes = sizes_of(graph, plan)
        model = ComputeModel(sizes.live, hardware, sizes.point)
        costs = [model.cost(node) for node in sizes.live.nodes]
        seconds = [0.0 if cost is FREE else float(sizes.point.value(cost.seconds)) for cost in costs]
        self.before = dict(zip(sizes.live.nodes, itertools.accumulate(seconds, initial=0.0), strict=False))
        """Node -> seconds of compute before it."""
        self.launches: dict[fx.Node, Launch] = launches_of(sizes, hardware)
        self.seconds = {node: float(sizes.point.value(launch.seconds)) for node, launch in self.launches.items()}
        self.places = {node: i for i, node in enumerate(sizes.live.nodes)}
        owner = {index: node for node in self.launches for index in sizes.live.storages_of[node]}
        """Storage -> the launch that fills it."""
        self.waits: dict[fx.Node, set[fx.Node]] = {
            node: {owner[index] for index in sizes.live.storages_of[node] if index in owner}
            for node in sizes.live.nodes
            if collectives.is_wait(node)
        }

    def run(self, moved: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, Transfer]:
        """The transfers in the order of their launches.

        Args:
            moved: launch or wait -> the node right before which it stands instead; those that go to one place keep the
                order of this mapping, ahead of what stands there.
        """
        order_of = {node: i for i, node in enumerate(moved)}
        events = sorted(
            (self.places[moved.get(node, node)], order_of.get(node, len(moved)), self.places[node], node)
            for node in itertools.chain(self.launches, self.waits)
        )
        late = 0.0  # how much later than by compute alone
        free: dict[str, tuple[float, fx.Node]] = {}
        ends: dict[fx.Node, float] = {}
        found: dict[fx.Node, Transfer] = {}
        for *_, node in events:
            now = self.before[moved.get(node, node)] + late
            if node in self.launches:
                group = self.launches[node].group
                until, last = free.get(group, (0.0, None))
                start = max(now, until)
                ends[node] = start + self.seconds[node]
                free[group] = ends[node], node
                found[node] = Transfer(start=start, behind=last if until >= now else None, exposed=0.0)
                continue
            for launch in self.waits[node]:
                exposed = max(0.0, ends[launch] - (self.before[moved.get(node, node)] + late))
                late += exposed
                found[launch] = Transfer(
                    start=found[launch].start, behind=found[launch].behind, exposed=found[launch].exposed + exposed
                )
        return found
