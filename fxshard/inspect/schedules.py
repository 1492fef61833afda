"""The schedule that was compiled, beside others that could have been, and beside what no schedule can beat.

[Note: what no schedule can beat]
Schedules of a graph differ in where its launches and waits stand; the compute between them stays in its order. A
gather goes up, with what prepares it; its wait stays. The wait of a reduction goes down, with what is made of its
result; its launch stays. So whatever the schedule, all that has been waited for by some point has been on the link
before, one transfer after the other; all that is launched from some point on is on the link after it; and the compute
between the two points comes between. The bound is the longest such way through the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torch import fx, nn

from fxshard.cost.sizes import sizes_of
from fxshard.cost.stats import GraphStats, graph_stats
from fxshard.cost.step import GraphOfStep, StepTime, step_time
from fxshard.cost.timeline import Timeline
from fxshard.hardware import HardwareSpec
from fxshard.ir import collectives, launch_groups
from fxshard.ir.collectives import ALL_REDUCES, GATHERS, REDUCTIONS
from fxshard.ir.history import Snapshot
from fxshard.ir.plan import FramePlan
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.chain_reductions import ChainReductions
from fxshard.passes.hoist_copies import HoistCopies
from fxshard.passes.hoist_prefetch import HoistPrefetch

if TYPE_CHECKING:
    from fxshard.inspect.explanation import FrameExplanation

OTHERS: Mapping[str, int | Literal["auto"]] = {"no prefetch": 0, "1 ahead": 1, "auto": "auto"}
"""What the compiled schedule is compared with -> `HoistPrefetch.depth`; the user's lists count in none of them."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What one schedule of a graph costs; seconds at the world size and shapes that the graph was traced with."""

    name: str  # "compiled", or a key of `OTHERS`
    seconds: float  # of the graph, compute and exposed communication
    exposed_seconds: float  # how long compute stands at waits
    unsharded_peak_bytes: int  # the most that unsharded parameters take

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.seconds * 1e6:,.0f} us, {self.exposed_seconds * 1e6:,.0f} us of it exposed; "
            f"{self.unsharded_peak_bytes:,} B unsharded"
        )


def schedules(frame: FrameExplanation, stage: str) -> tuple[Schedule, ...]:
    """The schedule that runs, then `OTHERS` if `hoist_prefetch` had something to hoist, within the same budget."""
    found = [_schedule("compiled", frame.stats_of(frame.running(stage)))]
    before = _before_hoisting(frame, stage)
    if before is None:
        return tuple(found)
    kind = frame.running(stage).stage.kind
    for name, depth in OTHERS.items():
        graph = _hoisted(before, depth, frame, kind)
        stats = graph_stats(graph, frame.plan, frame.hardware, donated=kind == "backward")
        found.append(_schedule(name, stats))
    return tuple(found)


def lower_bound(frame: FrameExplanation, stage: str) -> float:
    """Seconds that no schedule of a stage's launches can beat; see [Note: what no schedule can beat]."""
    # Inductor's own passes may have made the compute of the graph that runs shorter than that of the others.
    graphs = [frame.running(stage).graph, _before_hoisting(frame, stage)]
    return min(least_seconds(graph, frame.plan, frame.hardware) for graph in graphs if graph is not None)


def step(calls: Sequence[FrameExplanation]) -> StepTime:
    """What frames take that a forward calls in this order, and a backward in the reverse one."""
    graphs = {id(frame): _graphs_of_step(frame) for frame in calls}
    forward = [graphs[id(frame)].get("forward") or graphs[id(frame)].get("inference") for frame in calls]
    backward = [graphs[id(frame)].get("backward") for frame in reversed(calls)]
    return step_time([graph for graph in (*forward, *backward) if graph])


def _graphs_of_step(frame: FrameExplanation) -> dict[str, GraphOfStep]:
    graphs = {stage: frame.running(stage).graph for stage in frame.scheduled}
    return {
        stage: GraphOfStep(graph, Timeline(sizes_of(graph, frame.plan), frame.hardware))
        for stage, graph in graphs.items()
    }


def least_seconds(graph: fx.Graph, plan: FramePlan, hardware: HardwareSpec) -> float:
    """`lower_bound` of one graph, which may have any schedule; what nobody waits for counts as no time."""
    timeline = Timeline(sizes_of(graph, plan), hardware)
    launches = timeline.launches.keys()
    waits = {node: launches & sources for node, sources in timeline.needs.items() if collectives.is_wait(node)}
    goes_up = {node for group in launch_groups.groups_of(graph, GATHERS) for node in group.nodes}
    reductions = (group for kind in (REDUCTIONS, ALL_REDUCES) for group in launch_groups.groups_of(graph, kind))
    goes_down = _with_readers(wait for group in reductions for wait in group.waits)
    waited: set[fx.Node] = set().union(*waits.values())
    to_come = waited - goes_up - goes_down
    needed: set[fx.Node] = set()
    compute = late = longest = 0.0  # seconds of the compute that stays, and how much later than by it alone it is
    for node in graph.nodes:
        if node in waits and node not in goes_down:
            needed |= waits[node]
            late = max(late, _on_link(timeline, needed) - compute)
        elif node in to_come:
            longest = max(longest, late + compute + _on_link(timeline, to_come))
            to_come.remove(node)
        if node in timeline.compute and node not in goes_up | goes_down | timeline.queues.keys():
            compute += timeline.seconds[node]
    return max(longest, late + compute, timeline.compute_seconds, _on_link(timeline, waited))


def _on_link(timeline: Timeline, launches: Collection[fx.Node]) -> float:
    """Seconds that the launches take, those of one process group one after the other."""
    busy: dict[str, float] = {}
    for launch in sorted(launches):  # nodes compare by their place in the graph
        group = timeline.queues[launch]
        busy[group] = busy.get(group, 0.0) + timeline.seconds[launch]
    return max(busy.values(), default=0.0)


def _with_readers(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes`, and whatever is made of their values."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found and node.op != "output":
            found.add(node)
            pending.extend(node.users)
    return found


def _before_hoisting(frame: FrameExplanation, stage: str) -> fx.Graph | None:
    """The graph that `hoist_prefetch` got, if it ran and there was something to hoist."""
    records = frame.graphs[stage]
    names = list(records)
    hoisting = HoistPrefetch().name
    if hoisting not in names:
        return None
    graph = records[names[names.index(hoisting) - 1]].graph
    return graph if launch_groups.groups_of(graph, GATHERS) else None


def _hoisted(before: fx.Graph, depth: int | Literal["auto"], frame: FrameExplanation, kind: GraphKind) -> fx.Graph:
    units = {key: replace(unit, forward_prefetch=(), backward_prefetch=()) for key, unit in frame.plan.units.items()}
    gm = fx.GraphModule(before.owning_module or nn.Module(), Snapshot(before).copy())
    context = PassContext(
        plan=replace(frame.plan, units=units),
        kind=kind,
        hardware=frame.hardware,
        unsharded_budget_bytes=frame.unsharded_budget_bytes,
    )
    HoistPrefetch(depth=depth).apply(gm, context)
    if depth:
        HoistCopies().apply(gm, context)
    ChainReductions().apply(gm, context)
    return gm.graph


def _schedule(name: str, stats: GraphStats) -> Schedule:
    at = stats.evaluate()
    return Schedule(
        name=name,
        seconds=float(at.compute_seconds + at.exposed_seconds),
        exposed_seconds=float(at.exposed_seconds),
        unsharded_peak_bytes=int(at.unsharded_peak_bytes),
    )
