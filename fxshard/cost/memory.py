"""Live bytes per node and where they peak.

Counted are the graph's own storages: inputs (the flats among them), activations, gathered buffers and gradients, as
`ir/liveness.py` has them, every op's result among them: what Inductor fuses away is counted as well. Not counted are
optimizer state, what other graphs saved, allocator rounding and workspaces.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from fxshard.cost.sizes import Sizes
from fxshard.cost.symbols import Quantity, Sum
from fxshard.ir import ops, tags
from fxshard.ir.plan import FramePlan


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that is live at once."""

    # what is live at `node`, as an expression; for shapes far from the traced ones another node may be worse
    nbytes: Quantity
    node: fx.Node  # where the peak is at the traced world size and shapes; the first such node


def live_bytes(sizes: Sizes, only: Collection[int] | None = None) -> dict[fx.Node, int]:
    """For each node the bytes that are live while it runs, where it was traced: of all storages, or `only` of these."""
    values = [int(sizes.point.value(size)) for size in _counted(sizes, only)]
    return {node: int(total) for node, total in zip(sizes.live.nodes, sizes.live.running_sum(values), strict=True)}


def peak(sizes: Sizes, only: Collection[int] | None = None) -> Peak:
    """Find the peak; arguments as in `live_bytes`."""
    series = live_bytes(sizes, only)
    node = max(series, key=series.__getitem__)
    at = sizes.live.nodes.index(node)
    storages = zip(sizes.live.storages, _counted(sizes, only), strict=True)
    return Peak(nbytes=Sum(size for s, size in storages if s.birth <= at <= s.last_use).total, node=node)


def on_device(sizes: Sizes, plan: FramePlan) -> frozenset[int]:
    """The storages that are not in the host's memory, as offloaded shards and their gradients are."""
    offloaded = {key for key, unit in plan.units.items() if unit.offload is not None}

    def is_on_host(maker: fx.Node) -> bool:
        shard = tags.meta_of(maker).shard
        return maker.target is ops.COPY_TO_HOST or (shard is not None and shard.unit in offloaded)

    return frozenset(i for i, storage in enumerate(sizes.live.storages) if not is_on_host(storage.maker))


def _counted(sizes: Sizes, only: Collection[int] | None) -> list[Quantity]:
    return [size if only is None or i in only else 0 for i, size in enumerate(sizes.of_storage)]
