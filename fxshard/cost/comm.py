"""What the launches of a graph cost: the alpha-beta model, one in-order queue per process group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxshard.cost.sizes import Sizes, sizes_inside
from fxshard.cost.symbols import WORLD_SIZE, Quantity
from fxshard.hardware import HardwareSpec, Link
from fxshard.ir import collectives, regions, tags
from fxshard.ir.launches import kind_of
from fxshard.ir.liveness import tensors_in
from fxshard.ir.plan import BY
from fxshard.ir.text import dtype_text


@dataclass(frozen=True, kw_only=True)
class LaunchCost:
    """One collective of a graph."""

    node: fx.Node  # what starts it
    # key of the unit that it serves, several with commas; `None` for a collective that is not of our passes
    unit: str | None
    axis: str  # mesh axis that such a one is on, empty if nothing says
    op: str  # short name: `all_gather`, `reduce_scatter`, `all_reduce`, ...
    dtype: str  # short names of what is sent
    group: str  # name of the process group
    nbytes: Quantity  # of the whole buffer, all ranks' shards
    seconds: Quantity  # that it keeps its group's queue busy

    @property
    def label(self) -> str:
        """What is launched, and on which axis if that is the model's own."""
        return f"{self.axis} {self.op}" if self.axis else self.op


def launches_of(sizes: Sizes, hardware: HardwareSpec) -> dict[fx.Node, LaunchCost]:
    """The launches of a graph, in program order."""
    known: dict[tuple[str, Quantity, Quantity, Link], Quantity] = {}
    found = {}
    for node, nbytes in sizes.of_launch.items():
        given = collectives.arguments_of(node)
        op, group = kind_of(node), str(given.get("group_name"))
        known_ranks = sizes.group_sizes.get(group, sizes.point.world_size)
        ranks = WORLD_SIZE if group in sizes.open_groups else given.get("group_size", known_ranks)
        units, number = tags.units_of(node), int(sizes.point.value(ranks))
        axis = "" if units else sizes.axes.get(group, "")
        if axis:
            link = hardware.tensor_link(number)
        elif units and op == "all_reduce":  # alone of those that are ours it goes between replicas
            link = hardware.replica_link(number, sizes.point.world_size)
        else:
            link = hardware.link(number)
        key = (op, nbytes, ranks, link)
        if key not in known:
            crosses = op == "all_to_all" and hardware.crosses_nodes(number) and link == hardware.link(number)
            known[key] = (
                exchange_between_nodes(nbytes, number, hardware)
                if crosses
                else transfer_seconds(op, nbytes, ranks, link)
            )
        found[node] = LaunchCost(
            node=node,
            unit=", ".join(units) if units else None,
            axis=axis,
            op=op,
            dtype="+".join(dict.fromkeys(dtype_text(t.dtype) for t in tensors_in(node))),
            group=group.partition(BY)[0],  # what an object does goes over the links of the group behind it
            nbytes=nbytes,
            seconds=known[key],
        )
    return found


def launches_inside(sizes: Sizes, hardware: HardwareSpec) -> dict[fx.Node, list[LaunchCost]]:
    """Map call of a region -> what it launches, the model's own alone: it waits for each right behind the launch."""
    calls = {node: code for node in sizes.live.nodes if (code := regions.code_of(node)) is not None}
    known = {code: [*launches_of(sizes_inside(code, sizes), hardware).values()] for code in {*calls.values()}}
    return {node: known[code] for node, code in calls.items() if known[code]}


def exchange_between_nodes(nbytes: Quantity, ranks: int, hardware: HardwareSpec) -> Quantity:
    """Time of an all_to_all over several nodes: each rank sends to all others at once, over its own part of each link.

    What goes to another node does so once for each pair of ranks, not once for each node as in a ring.
    """
    inside = hardware.ranks_per_node
    near, far = (inside - 1) / hardware.link_bandwidth, (ranks - inside) / (hardware.network_bandwidth or 1.0)
    return hardware.link_latency + hardware.network_latency + nbytes / ranks * max(near, far)


def transfer_seconds(op: str, nbytes: Quantity, ranks: Quantity, link: Link) -> Quantity:
    """Time of one collective: `latency + factor * (ranks - 1) * (hop + nbytes / ranks / bandwidth)`.

    The alpha-beta (Hockney) model of a ring in the form of nccl-tests' bus bandwidth: in each of `ranks - 1` steps, of
    which an all_reduce has twice as many, a rank sends and receives `1 / ranks` of the whole buffer. So a message that
    is small beside `hop * bandwidth * ranks` does not reach the bandwidth.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md; Thakur et al., "Optimization of
    Collective Communication Operations in MPICH" (2005).
    """
    steps = (2 if op == "all_reduce" else 1) * (ranks - 1)
    moving = steps * nbytes / ranks / link.bandwidth
    return link.latency + moving + steps * link.hop if link.hop else link.latency + moving
