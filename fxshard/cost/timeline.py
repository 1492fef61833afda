"""When everything in a graph happens: compute in program order, collectives in one in-order queue per group.

Copies and casts on a side stream have a queue for each stream, which begins with what the main one has done by then.
A schedule is tried hundreds of times, so what does not depend on it is found once: the costs, the compute before each
node, and what each launch, copy and wait needs. A run then looks at launches, copies and waits alone.

[Note: expressions along a branch]
Where two times meet (a wait, a busy queue), the later one counts. Which one is later is decided by numbers, at the
world size and shapes that the graph was traced with; the result is the sum of the costs along the path that was later,
and so an expression again. It is exact as long as other shapes would decide alike.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from fxshard.cost.comm import launches_inside, launches_of
from fxshard.cost.roofline import FREE, ComputeModel
from fxshard.cost.sizes import Sizes
from fxshard.cost.symbols import Quantity, Sum
from fxshard.hardware import HardwareSpec, describes
from fxshard.ir import collectives, ops, tags
from fxshard.ir.liveness import Liveness, tensors_in

_END = operator.attrgetter("end")


class Stop(NamedTuple):
    """Compute stands before the node at `place` until `cause` is done."""

    place: int
    cause: Transfer


@dataclass(eq=False, slots=True, kw_only=True)
class Transfer:
    """A launch on its queue, or a copy on its side stream; seconds since the graph began, where it was traced."""

    node: fx.Node  # the launch or copy
    start: float  # when the queue takes it up
    end: float  # when it is done
    exposed: float = 0.0  # how long compute stood at waits for the launch; at those for its copies too
    behind: fx.Node | None  # what the queue did right before, `None` if it stood idle
    after: Transfer | None  # whose end was the start; `None` if it could start as soon as compute had come to it
    place: int  # index of the node that compute had come to
    stop: Stop | None  # where compute had last stood by then

    def chain(self) -> Iterator[Transfer]:
        """This one, and what it had to be after, back to what compute came to."""
        transfer: Transfer | None = self
        while transfer is not None:
            yield transfer
            transfer = transfer.after


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When one schedule does what: its launches and copies as it comes to them, and where compute stood last."""

    transfers: dict[fx.Node, Transfer]
    last_stop: Stop | None


class Timeline:
    """A graph on the clock, to be asked again and again.

    A run of it compares schedules, in expressions, and so leaves out what `Clock` of `cost/step.py` has: that the host
    and collectives slow compute, and what other graphs have left on the queues.
    """

    def __init__(self, sizes: Sizes, hardware: HardwareSpec, *, fuses: bool = False) -> None:
        """Cost every node of a graph once; `fuses` as of `ComputeModel`."""
        live, value = sizes.live, sizes.point.value
        self.hardware, self._value = hardware, value
        model = ComputeModel(live, hardware, sizes.point, fuses=fuses)
        costs = {node: cost for node in live.nodes if (cost := model.cost(node)) is not FREE}
        self.copies = {node: cost for node, cost in costs.items() if node.target in ops.BETWEEN_HOST_AND_DEVICE}
        self.compute = {node: cost for node, cost in costs.items() if node not in self.copies}
        launched = launches_of(sizes, hardware)
        self.launches = {node: cost for node, cost in launched.items() if not collectives.waits_itself(node)}
        self.inside = launches_inside(sizes, hardware)
        self.inside |= {node: [cost] for node, cost in launched.items() if node not in self.launches}
        """Call of a region, or launch that waits itself -> what it launches and waits for: to what stands around it, no
        other than compute."""
        self._quantities: dict[fx.Node, Quantity] = {
            node: cost.seconds for found in (costs, self.launches) for node, cost in found.items()
        }
        for node, waited in self.inside.items():
            self._quantities[node] += Sum(launch.seconds for launch in waited).total
        self.seconds = {node: float(value(seconds)) for node, seconds in self._quantities.items()}
        """Launch, copy or node of compute -> what it takes."""
        self.launched_bytes = {node: float(value(launch.nbytes)) for node, launch in self.launches.items()}
        """Launch -> bytes of its whole buffer, where the graph was traced."""
        self.shares = {
            node: hardware.share_of_collective(self.launched_bytes[node] / max(self.seconds[node], 1e-12), launch.op)
            for node, launch in self.launches.items()
        }
        """Launch -> the share of compute's speed that it takes while it runs."""
        self.host_seconds = {node: _host_seconds(node, launch.op, hardware) for node, launch in self.launches.items()}
        """Launch -> what it takes of the thread that computes, which on a CPU is that of the host."""
        self.queues = {node: launch.group for node, launch in self.launches.items()}
        self.queues |= {node: stream for node in costs if (stream := tags.meta_of(node).stream)}
        """Launch or copy -> its process group or side stream."""
        self.needs, self._launch_of = _needs(live, self.launches, self.queues)
        """Launch, copy or wait -> the launches and copies that must be done before."""
        self._places = {node: place for place, node in enumerate(live.nodes)}
        on_main = (0.0 if node in self.queues else self.seconds.get(node, 0.0) for node in live.nodes)
        self._before = list(itertools.accumulate(on_main, initial=0.0))

    @property
    def compute_seconds(self) -> float:
        """Seconds that all compute takes if it waits for nothing."""
        return self._before[-1]

    @property
    def nodes(self) -> Collection[fx.Node]:
        """All nodes of the graph, in its order."""
        return self._places.keys()

    def work_of(self, node: fx.Node) -> tuple[float, float]:
        """Return FLOPs and bytes of a node of compute, where the graph was traced."""
        cost = self.compute[node]
        return float(self._value(cost.flops)), float(self._value(cost.nbytes))

    def place_of(self, node: fx.Node) -> int:
        """Return the index of a node in the graph."""
        return self._places[node]

    def before(self, place: int) -> float:
        """Return the seconds of compute that stand before the node of that index, or before the end."""
        return self._before[place]

    def computed_before(self, node: fx.Node) -> float:
        """Return the seconds of compute that stand before a node."""
        return self._before[self._places[node]]

    def last_before(self, seconds: float) -> fx.Node:
        """Return the last node to which compute has come by then, if it waits for nothing; the first one if to none."""
        place = bisect.bisect_right(self._before, seconds, hi=len(self._places)) - 1
        return list(self._places)[max(place, 0)]

    def arrivals(self) -> dict[fx.Node, fx.Node]:
        """Return for each launch the first node that compute comes to when it is done, if compute waits for nothing."""
        found: dict[fx.Node, fx.Node] = {}
        free: dict[str, float] = {}
        nodes = list(self._places)
        for node in self.launches:
            queue = self.queues[node]
            free[queue] = max(self.computed_before(node), free.get(queue, 0.0)) + self.seconds[node]
            place = bisect.bisect_left(self._before, free[queue], lo=self._places[node] + 1, hi=len(nodes) - 1)
            found[node] = nodes[place]
        return found

    def run(self, moved: Mapping[fx.Node, fx.Node] | None = None) -> Timing:
        """Run a schedule on the clock.

        `moved` says for launches and waits right before which node they stand instead; those that go to one place keep
        their order in it, ahead of what stands there.
        """
        transfers: dict[fx.Node, Transfer] = {}
        last_on: dict[str, Transfer] = {}  # queue -> what it was given last
        stop: Stop | None = None
        late = 0.0  # how much later than by compute alone
        for place, node in self._events(moved or {}):
            now = self._before[place] + late
            needed = [transfers[source] for source in self.needs[node]]
            if node in self.queues:
                queue = self.queues[node]
                last = last_on.get(queue)
                after = max((t for t in (last, *needed) if t and t.end > now), key=_END, default=None)
                start = after.end if after else now
                transfers[node] = last_on[queue] = Transfer(
                    node=node,
                    start=start,
                    end=start + self.seconds[node],
                    behind=last.node if last and last.end >= now else None,
                    after=after,
                    place=place,
                    stop=stop,
                )
                continue
            for transfer in needed:
                exposed = transfer.end - (self._before[place] + late)
                if exposed > 0.0:
                    late, stop = late + exposed, Stop(place, transfer)
                    transfers[self._launch_of.get(transfer.node, transfer.node)].exposed += exposed
        return Timing(transfers=transfers, last_stop=stop)

    def exposed(self, timing: Timing) -> Quantity:
        """Return how long compute stands at waits; see [Note: expressions along a branch].

        It is what the path spends on queues, less the compute that stands beside these.
        """
        exposed, nodes, stop = Sum(), list(self._places), timing.last_stop
        while stop is not None:
            for transfer in stop.cause.chain():
                exposed.add(self._quantities[transfer.node])
            for node in nodes[transfer.place : stop.place]:
                if node in self.compute and node not in self.queues:
                    exposed.add(self._quantities[node], -1)
            stop = transfer.stop
        for launch in (launch for waited in self.inside.values() for launch in waited):
            exposed.add(launch.seconds)
        return exposed.total

    def _events(self, moved: Mapping[fx.Node, fx.Node]) -> Iterable[tuple[int, fx.Node]]:
        """Launches, copies and waits in the order of a schedule, each with the place where it stands."""
        order_of = {node: i for i, node in enumerate(moved)}
        standing = (
            (self._places[moved.get(node, node)], order_of.get(node, len(moved)), self._places[node], node)
            for node in self.needs
        )
        return [(place, node) for place, *_, node in sorted(standing)]


def _host_seconds(launch: fx.Node, op: str, hardware: HardwareSpec) -> float:
    if not describes(hardware, "cpu"):
        return 0.0
    reduces = op == "reduce_scatter"
    per_tensor = hardware.reduce_tensor_overhead if reduces else hardware.gather_tensor_overhead
    return hardware.launch_overhead + (max(len(tensors_in(launch)), 1) - 1) * per_tensor


def _needs(
    live: Liveness, launches: Collection[fx.Node], queues: Collection[fx.Node]
) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, fx.Node]]:
    """`Timeline.needs`, and for each copy of what a launch brought that launch."""
    needs: dict[fx.Node, list[fx.Node]] = {}
    launch_of: dict[fx.Node, fx.Node] = {}
    filled: dict[int, fx.Node] = {}  # storage -> the launch, or the copy of what a launch brought, that fills it
    cast: dict[int, fx.Node] = {}  # storage -> what makes it on a side stream, of what is there
    for node in live.nodes:
        made, read = live.storages_of[node], [i for source in node.all_input_nodes for i in live.storages_of[source]]
        if node in launches:
            needs[node] = _found(cast, read)
            filled |= dict.fromkeys(made, node)
        elif collectives.is_wait(node):
            needs[node] = _found(filled, read) if node.target is not ops.DEFERRED_WAIT else []
        elif node.target in ops.BETWEEN_HOST_AND_DEVICE:
            needs[node] = _found(filled, read)
            filled |= dict.fromkeys(made, node)
        elif node in queues:
            sources = _found(filled, read)[:1]
            needs[node] = sources + _found(cast, read)
            for source in sources:
                launch_of[node] = launch_of.get(source, source)
            (filled if sources else cast).update(dict.fromkeys(made, node))
    return needs, launch_of


def _found(made_by: Mapping[int, fx.Node], storages: Iterable[int]) -> list[fx.Node]:
    return list(dict.fromkeys(made_by[i] for i in storages if i in made_by))
