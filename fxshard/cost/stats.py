"""The statistics of a graph: how much it gathers, reduces, computes and holds, and how long it takes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from fxshard.cost.sizes import Sizes, sizes_of
from fxshard.cost.symbols import Quantity, Sum, evaluate
from fxshard.cost.timeline import Timeline
from fxshard.errors import ConfigError
from fxshard.hardware import HardwareSpec
from fxshard.ir import ops, tags
from fxshard.ir.liveness import unsharded_storages
from fxshard.ir.plan import FramePlan


@dataclass(frozen=True, kw_only=True)
class GraphStats:
    """What one graph does in one run, on one rank.

    Quantities are numbers, or sympy expressions in the graph's own symbols and `world_size`; `evaluate` makes numbers.

    Attributes:
        num_nodes: nodes of the graph.
        collectives: short name of an op -> number of launches; behind the name of a mesh axis (`tp all_gather`) those
            that the model itself launches on it.
        gathered_bytes: of all all_gathers' whole buffers, without those.
        reduced_bytes: of all reduce_scatters' whole buffers, without those.
        copied_bytes: of all copies between host and device.
        flops: of matrix products, convolutions and attention.
        compute_seconds: sum over the nodes, without copies and casts on side streams.
        comm_seconds: sum over the launches.
        exposed_seconds: how long compute stands at waits.
        peak_bytes: the most that is live at once, without what is on the host.
        unsharded_peak_bytes: the most that is live at once of unsharded parameters.
        world_size: that the graph was traced for.
        hints: name of a symbol -> the value that it was traced with.
    """

    num_nodes: int
    collectives: Mapping[str, int]
    gathered_bytes: Quantity
    reduced_bytes: Quantity
    copied_bytes: Quantity
    flops: Quantity
    compute_seconds: Quantity
    comm_seconds: Quantity
    exposed_seconds: Quantity
    peak_bytes: Quantity
    unsharded_peak_bytes: Quantity
    world_size: int
    hints: Mapping[str, int] = field(default_factory=dict)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the open symbols, `world_size` among them."""
        values = (getattr(self, name) for name in _QUANTITIES)
        free = (symbol.name for value in values if isinstance(value, sympy.Basic) for symbol in value.free_symbols)
        return tuple(sorted(set(free)))

    def evaluate(self, world_size: int | None = None, **symbols: int) -> GraphStats:
        """Return the same with numbers; ranks and symbols that are not given are those that the graph was traced with.

        Raises a ConfigError for a name that is not a symbol of the graph, or a world size below 1.
        """
        known = sorted({*self.symbols, *self.hints} - {"world_size"})
        unknown = [name for name in symbols if name not in known]
        if unknown:
            raise ConfigError(f"the graph has no symbol {', '.join(unknown)}; it has {', '.join(known) or 'none'}.")
        if world_size is not None and world_size < 1:
            raise ConfigError(f"world_size must be a positive int, got {world_size!r}.")
        ranks = self.world_size if world_size is None else world_size
        values = {**self.hints, **symbols}
        numbers: dict[str, Any] = {name: evaluate(getattr(self, name), ranks, values) for name in _QUANTITIES}
        return dataclasses.replace(self, **numbers, world_size=ranks, hints=values)

    def __str__(self) -> str:
        """One line in human units, at the world size and shapes that the graph was traced with."""
        at = self.evaluate()
        launches = [f"{count} {op}" for op, count in at.collectives.items()] or ["no collective"]
        return (
            f"{at.num_nodes} nodes, {', '.join(launches)}, "
            f"gathered {_mib(at.gathered_bytes)}, reduced {_mib(at.reduced_bytes)}, "
            f"{f'copied {_mib(at.copied_bytes)}, ' if at.copied_bytes else ''}{_short(at.flops / 1e9)} GFLOP, "
            f"compute {_ms(at.compute_seconds)}, comm {_ms(at.comm_seconds)}, exposed {_ms(at.exposed_seconds)}, "
            f"peak {_mib(at.peak_bytes)}, unsharded {_mib(at.unsharded_peak_bytes)}"
        )


_QUANTITIES = tuple(field.name for field in dataclasses.fields(GraphStats) if field.type == "Quantity")


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """One row of the table of launches."""

    node: str  # name of the launch
    unit: str | None  # key of its unit, `None` for a collective that no pass of ours inserted
    op: str  # short name of the op
    dtype: str  # what is sent
    nbytes: Quantity  # of the whole buffer
    seconds: Quantity  # that the launch takes
    start: float  # when it starts, seconds since the graph began, at the traced world size and shapes
    exposed_seconds: float  # how long compute stands at its wait, likewise


def graph_stats(graph: fx.Graph, plan: FramePlan, hardware: HardwareSpec, *, donated: bool = False) -> GraphStats:
    """The statistics of a graph, after any pass; adds no guard to it.

    `donated`: saved activations are freed after their last use, as in backward. Markers cost nothing.
    """
    sizes = sizes_of(graph, plan, donated=donated)
    timeline = Timeline(sizes, hardware)
    compute = timeline.compute
    launches = [*timeline.launches.values(), *itertools.chain(*timeline.inside.values())]
    return GraphStats(
        num_nodes=len(sizes.live.nodes),
        collectives=dict(collections.Counter(launch.label for launch in launches)),
        gathered_bytes=Sum(launch.nbytes for launch in launches if launch.label == "all_gather").total,
        reduced_bytes=Sum(launch.nbytes for launch in launches if launch.label == "reduce_scatter").total,
        copied_bytes=Sum(cost.nbytes for cost in timeline.copies.values()).total,
        flops=Sum(cost.flops for cost in compute.values()).total,
        compute_seconds=Sum(cost.seconds for node, cost in compute.items() if node not in timeline.queues).total,
        comm_seconds=Sum(launch.seconds for launch in launches).total,
        exposed_seconds=timeline.exposed(timeline.run()),
        peak_bytes=peak_bytes(sizes, _on_device(sizes, plan)),
        unsharded_peak_bytes=peak_bytes(sizes, unsharded_storages(sizes.live)),
        world_size=sizes.point.world_size,
        hints=dict(sizes.point.hints),
    )


def peak_bytes(sizes: Sizes, only: Collection[int] | None = None) -> Quantity:
    """The most that is live at once of all storages, or `only` of these, as [Note: liveness] counts.

    It is what is live where that is most at the traced world size and shapes; far from these another node may be worse.
    """
    counted = [size if only is None or i in only else 0 for i, size in enumerate(sizes.of_storage)]
    live = sizes.live.running_sum([int(sizes.point.value(size)) for size in counted])
    at, storages = live.index(max(live)), zip(sizes.live.storages, counted, strict=True)
    return Sum(size for storage, size in storages if storage.birth <= at <= storage.last_use).total


def _on_device(sizes: Sizes, plan: FramePlan) -> frozenset[int]:
    """The storages that are not in the host's memory, as offloaded shards and their gradients are."""
    offloaded, makers = {key for key, unit in plan.units.items() if unit.offload}, enumerate(sizes.live.storages)
    shards = ((i, each.maker, tags.meta_of(each.maker).shard) for i, each in makers)
    return frozenset(
        i
        for i, maker, shard in shards
        if maker.target is not ops.COPY_TO_HOST and not (shard and shard.unit in offloaded)
    )


def collectives_of(graph: fx.Graph, plan: FramePlan, hardware: HardwareSpec) -> list[CollectiveCost]:
    """The launches of a graph with their costs, in program order."""
    timeline = Timeline(sizes_of(graph, plan), hardware)
    transfers = timeline.run().transfers
    return [
        CollectiveCost(
            node=launch.node.name,
            unit=launch.unit,
            op=launch.op,
            dtype=launch.dtype,
            nbytes=launch.nbytes,
            seconds=launch.seconds,
            start=transfers[node].start,
            exposed_seconds=transfers[node].exposed,
        )
        for node, launch in timeline.launches.items()
    ]


def _mib(nbytes: float) -> str:
    return f"{_short(nbytes / 2**20)} MiB"


def _ms(seconds: float) -> str:
    return f"{_short(seconds * 1e3)} ms"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
