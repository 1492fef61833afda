"""`compare`: a profile of a real step beside the planned one, node by node, and the device that it shows.

[Note: matched kernels]
Products and attention of the profile are matched with those of the plan in their order, by kind and, where the profile
knows it, by FLOPs; collectives by kind and bytes. What else runs between two neighbours that are matched is compared as
a whole: a compiler makes other kernels of it than a plan has nodes. What is at the ends (the optimizer) is left out.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fxshard.cost.step_record import ATTENTION, OTHER, PRODUCT
from fxshard.errors import ConfigError
from fxshard.hardware import HardwareSpec
from fxshard.inspect.tables import duration
from fxshard.plan.plan import Plan, PlannedRun
from fxshard.plan.profile import COLLECTIVES, ProfiledKernel, kernels_of, read

if TYPE_CHECKING:
    from rich.table import Table


class MatchedNode(NamedTuple):
    """A node of the plan, or what runs before one, and the same in the profile."""

    kind: str
    label: str  # "backward layers.3 mm_2", "all_gather layers.3"
    size: float  # FLOPs of a product or attention, bytes of all else
    planned: float  # seconds in the plan
    measured: float  # seconds in the profile


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A planned step and a real one; `print` of rich shows a table.

    Attributes:
        run: of the plan.
        nodes: what is in both.
        unmatched: products, attention and collectives that the plan alone has, and that the profile alone has.
        seconds: from the first kernel of the profiled step to the end of the last.
        exposed: seconds of it in which a collective ran and no compute.
        hardware: the plan's, with what the profile shows; `to_json` writes what `--hardware` reads.
    """

    run: PlannedRun
    nodes: Sequence[MatchedNode]
    unmatched: tuple[int, int]
    seconds: float
    exposed: float
    hardware: HardwareSpec

    def __rich__(self) -> Table:
        """The table."""
        from rich.table import Table

        caption = "{} more are in the plan alone, {} in the profile alone".format(*self.unmatched)
        table = Table("what", "nodes", "planned", "measured", "measured/planned", title=self.run.name, caption=caption)
        rows = [("exposed", "", sum(self.run.cost.exposed.values()), self.exposed)]
        rows += [("step", "", self.run.cost.seconds, self.seconds)]
        for kind in reversed(dict.fromkeys(node.kind for node in self.nodes)):
            nodes = [node for node in self.nodes if node.kind == kind]
            rows.insert(0, (kind, str(len(nodes)), sum(n.planned for n in nodes), sum(n.measured for n in nodes)))
        for name, count, planned, measured in rows:
            ratio = f"{measured / planned:.2f}" if planned else ""
            table.add_row(name, count, duration(planned), duration(measured), ratio)
        return table


def compare(plan: Plan, profile: Any) -> Comparison:
    """Lay a profile of a training step beside the plan of it, and propose a device by what it shows.

    The last whole step counts that `profile.step()` marks, without marks the whole trace. See [Note: matched kernels].

    Args:
        plan: of one run, the one that was profiled: `dataclasses.replace(plan, runs=[plan.runs[2]])`.
        profile: a `torch.profiler.profile` that has ended, or the path of what it exported. With `record_shapes=True`
            products are matched by their sizes, too.

    Raises:
        ConfigError: the plan has several runs, or the profile is none or has nothing of the plan.
    """
    if len(plan.runs) != 1:
        raise ConfigError(
            f"compare takes a plan of one run, and this one has {len(plan.runs)}: choose the one that was profiled, "
            "dataclasses.replace(plan, runs=[plan.runs[0]])."
        )
    (run,) = plan.runs
    ops = {str(each.work.node.target).rpartition(".")[0].replace(".", "::") for each in run.cost.record.kernels()}
    ran = kernels_of(read(profile), ops)
    compute, sent = ([each for each in ran if (each.kind in COLLECTIVES) is which] for which in (False, True))
    matched = [*_compute(run, compute), *_launches(run, sent)]
    nodes = [node for node in matched if node is not None]
    if not nodes:
        raise ConfigError(
            f"the profile has {len(ran)} kernels, and none is of the plan's {len(matched)} products and collectives: "
            "profile a whole training step of the planned model, with record_shapes=True."
        )
    known, both = (sum(each.kind != OTHER for each in found) for found in (ran, nodes))
    return Comparison(
        run=run,
        nodes=nodes,
        unmatched=(len(matched) - len(nodes), known - both),
        seconds=max(each.end for each in ran) - ran[0].start,
        exposed=_busy(ran) - _busy(compute),
        hardware=_shown(plan.hardware, run, nodes),
    )


def _busy(kernels: Sequence[ProfiledKernel]) -> float:
    """Seconds in which at least one of them runs."""
    total, until = 0.0, -math.inf
    for each in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, each.end - max(each.start, until))
        until = max(until, each.end)
    return total


def _places(planned: Sequence[tuple[str, float]], measured: Sequence[ProfiledKernel]) -> list[int | None]:
    """For each planned kind and size the place of the same in what was measured."""
    unknown = {each.kind for each in measured if math.isnan(each.size)}
    keys = [(kind, "" if kind in unknown else f"{size:.2g}") for kind, size in planned]
    theirs = [(each.kind, "" if each.kind in unknown else f"{each.size:.2g}") for each in measured]
    found: list[int | None] = [None] * len(keys)
    for a, b, size in difflib.SequenceMatcher(None, keys, theirs, autojunk=False).get_matching_blocks():
        found[a : a + size] = range(b, b + size)
    return found


def _compute(run: PlannedRun, compute: Sequence[ProfiledKernel]) -> list[MatchedNode | None]:
    """Match products and attention, and what stands between two that are matched; `None` for what is not."""
    record, kernels, found = run.cost.record, list(run.cost.record.kernels()), list[MatchedNode | None]()
    ours = [i for i, each in enumerate(kernels) if each.kind != OTHER]
    theirs = [i for i, each in enumerate(compute) if each.kind != OTHER]
    planned = [(kernels[i].kind, kernels[i].work.flops) for i in ours]
    before: tuple[int, int] | None = None
    for i, place in zip(ours, _places(planned, [compute[j] for j in theirs]), strict=True):
        if place is None:
            found.append(None)
        else:
            work, (graph, name), real = kernels[i].work, record.runs[kernels[i].run], compute[theirs[place]]
            label = f"{graph.stage} {name or 'model'} {work.node.name}"
            if before is not None and before[1] == place - 1:
                between, ran = kernels[before[0] + 1 : i], compute[theirs[place - 1] + 1 : theirs[place]]
                planned_s, measured_s = (sum(each.end - each.start for each in of) for of in (between, ran))
                waits = kernels[i].start - kernels[before[0]].end > 1.001 * planned_s  # or copies of what was gathered
                if between and ran and not waits:
                    nbytes = sum(each.work.nbytes for each in between)
                    found.append(MatchedNode(OTHER, f"before {label}", nbytes, planned_s, measured_s))
            found.append(MatchedNode(work.kind, label, work.flops, kernels[i].seconds, real.end - real.start))
        before = None if place is None else (i, place)
    return found


def _launches(run: PlannedRun, sent: Sequence[ProfiledKernel]) -> list[MatchedNode | None]:
    """Match collectives, each kind in its own order: streams may interleave them in another way than queues."""
    found = list[MatchedNode | None]()
    for kind in COLLECTIVES:
        ours = [(each, cost) for each, cost in run.cost.record.collectives if cost[0] == kind]
        theirs = [each for each in sent if each.kind == kind]
        for (each, (_, size)), place in zip(ours, _places([cost for _, cost in ours], theirs), strict=True):
            if place is None:
                found.append(None)
            else:
                seconds = theirs[place].end - theirs[place].start
                found.append(MatchedNode(kind, run.cost.record.label(each), size, each.end - each.start, seconds))
    return found


def _shown(hardware: HardwareSpec, run: PlannedRun, nodes: Sequence[MatchedNode]) -> HardwareSpec:
    """Return the hardware with what the nodes show; what nothing shows stays."""
    changed: dict[str, Any] = {}
    products, attention, others = ([n for n in nodes if n.kind == kind and n.measured] for kind in _KINDS)
    if products:
        changed |= _products(hardware, products)
    for place, stage in enumerate(("forward", "backward")):
        if shown := [_speedup(hardware, node) for node in attention if node.label.startswith(stage)]:
            shares = list(changed.get("attention_efficiency", hardware.attention_efficiency))
            shares[place] *= statistics.median(shown)
            changed["attention_efficiency"] = tuple(shares)
    if others:
        changed["memory_bandwidth"] = sum(node.size for node in others) / sum(node.measured for node in others)
    changed |= _link(hardware, run, [node for node in nodes if node.kind in ("all_gather", "reduce_scatter")])
    source = f"measured by torch.profiler, {run.name}"
    sources = {**hardware.sources, **dict.fromkeys(changed, source)}
    return dataclasses.replace(hardware, name=f"{hardware.name}-profiled", source=source, sources=sources, **changed)


_KINDS = (PRODUCT, ATTENTION, OTHER)


def _speedup(hardware: HardwareSpec, node: MatchedNode) -> float:
    """How much faster a node ran than planned, beside the overhead of a kernel; collectives slow both alike."""
    return max(node.planned - hardware.kernel_overhead, 1e-3 * node.planned) / node.measured


def _products(hardware: HardwareSpec, nodes: Sequence[MatchedNode]) -> dict[str, Any]:
    """The peak, and the share of it for each size that was measured; beyond these the curve keeps its form."""
    speeds: dict[float, list[float]] = {}
    for node in nodes:
        speeds.setdefault(node.size, []).append(_speedup(hardware, node))
    ratio = {(flops / 2) ** (1 / 3): statistics.median(found) for flops, found in speeds.items()}
    least, most = min(ratio), max(ratio)
    beyond = {side: ratio[least if side < least else most] for side, _ in hardware.gemm_efficiency}
    ratio |= {side: found for side, found in beyond.items() if not least <= side <= most}
    curve = {side: hardware.gemm_share(2 * side**3) * found for side, found in sorted(ratio.items())}
    best = max(curve.values())
    return {
        "peak_flops": {name: peak * best for name, peak in hardware.peak_flops.items()},
        "gemm_efficiency": tuple((side, share / best) for side, share in curve.items()),
    }


def _link(hardware: HardwareSpec, run: PlannedRun, nodes: Sequence[MatchedNode]) -> dict[str, Any]:
    """Bandwidth of the shards' group, and latency: a line through what launches moved and took, of a size the shortest.

    A launch also stands waiting for the other ranks, which the shortest does least.
    """
    ranks = run.world_size[1] if isinstance(run.world_size, tuple) else run.world_size
    shortest: dict[float, float] = {}
    for node in nodes:
        moved = (ranks - 1) / ranks * node.size
        shortest[moved] = min(node.measured, shortest.get(moved, math.inf))
    if not shortest or ranks == 1:
        return {}
    link, sizes = hardware.link(ranks), sorted(shortest)
    hops = (ranks - 1) * link.hop
    slope, start = np.polyfit(sizes, [shortest[size] for size in sizes], 1) if len(sizes) > 1 else (0.0, 0.0)
    if slope <= 0:  # one size, or no difference between them: the latency stays
        start = link.latency + hops
        slope = (shortest[sizes[-1]] - start) / sizes[-1]
    if slope <= 0:
        return {}
    inside = hardware.ranks_per_node
    if inside and ranks > inside:
        return {"network_bandwidth": float(1 / slope) / inside}
    return {"link_latency": max(float(start) - hops, 0.0), "link_bandwidth": float(1 / slope)}
