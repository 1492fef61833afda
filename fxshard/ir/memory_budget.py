"""How many unsharded bytes a budget leaves where parameters are gathered earlier."""

from __future__ import annotations

import functools
import itertools

from torch import fx

from fxshard.errors import ConfigError
from fxshard.ir import text
from fxshard.ir.liveness import unsharded_bytes

GIB = 1 << 30


def require_fit(graph: fx.Graph, budget: int) -> None:
    """Raise `ConfigError` if the gathers of `graph` do not fit into `budget` bytes where they are."""
    node, needed = max(unsharded_bytes(graph), key=lambda found: found[1])
    if needed > budget:
        # Nothing can launch them later.
        raise ConfigError(
            f"memory_budget_gib: {needed / GIB:.3g} GiB of unsharded parameters are alive at %{node.name} without any "
            f"prefetch, and the budget is {budget / GIB:.3g}. Raise it, make smaller units (fully_shard on inner "
            "modules), or let units reshard after forward.\n"
            f"{text.window(node)}"
        )


class MemoryBudget:
    """What is free at each node of a graph, before anything in it is moved."""

    def __init__(self, graph: fx.Graph, budget: float | None, *, counts_all: bool = True) -> None:
        """Take `budget` in bytes, `None` for no limit: of all that is unsharded, or only of what is reserved here."""
        self.graph, self.budget, self._counts_all = graph, budget, counts_all
        self.nodes: list[fx.Node] = list(graph.nodes)

    def fits(self, first: fx.Node, last: fx.Node, nbytes: int) -> bool:
        """Return whether `nbytes` more fit between two nodes; what is there of it already is counted again."""
        if self.budget is None:
            return True
        alive = itertools.islice(self.used, self.places[first], self.places[last] + 1)
        return max(alive) + nbytes <= self.budget

    def earliest(self, wanted: fx.Node, now: fx.Node, nbytes: int) -> fx.Node:
        """Return the first node, from `wanted` on, before which `nbytes` can be allocated that are at `now` today."""
        place = self.places[now]
        if self.budget is not None:
            while place > self.places[wanted] and self.used[place - 1] + nbytes <= self.budget:
                place -= 1
            return self.nodes[place]
        return wanted

    def full_before(self, node: fx.Node, nbytes: int) -> str:
        """Say in words that `nbytes` more would be too much right before `node`."""
        needed = self.used[self.places[node] - 1] + nbytes
        return f"memory budget: {needed / GIB:.3g} of {(self.budget or 0) / GIB:.3g} GiB"

    def reserve(self, first: fx.Node, last: fx.Node, nbytes: int) -> None:
        """Count `nbytes` more from `first` up to where `last` begins."""
        if self.budget is not None:
            for place in range(self.places[first], self.places[last]):
                self.used[place] += nbytes

    @functools.cached_property
    def places(self) -> dict[fx.Node, int]:
        """Position of each node in the graph as it was."""
        return {node: i for i, node in enumerate(self.nodes)}

    @functools.cached_property
    def used(self) -> list[int]:
        """Bytes that count while each node runs."""
        return [nbytes for _, nbytes in unsharded_bytes(self.graph)] if self._counts_all else [0] * len(self.nodes)
