"""Compute gradients of weights that nothing waits for behind the launch of the last reduction, to hide it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import GraphModule

from fxshard.cost.sizes import sizes_of
from fxshard.cost.timeline import Timeline
from fxshard.ir import collectives, launch_groups, launches, liveness, tags
from fxshard.ir.launch_groups import LaunchGroup
from fxshard.passes._base import GraphPass, PassContext, Property

_NOTHING = 1e-6
"""Seconds that are not worth a change."""


@dataclass(frozen=True, kw_only=True)
class DeferWeightGradients(GraphPass):
    """Put what the last reduction of a backward needs first, and the rest of the compute before it behind it.

    Before   %dw = mm(%x, %dy)  reduce_scatter(%dw)  %dx = mm(%dy, %w)  %de = embedding(%dx)  reduce_scatter(%de)
    After    %dx = mm(%dy, %w)  %de = embedding(%dx)  reduce_scatter(%de)  %dw = mm(%x, %dy)  reduce_scatter(%dw)

    Nothing hides the reduction that a backward ends with: that of the embedding, as a rule, and a large one. But what
    comes before it also makes gradients of weights, which its own gradient is not made of. From one node on, the cut,
    the pass puts what the last reduction is made of first, and all else, in its order, behind its launch; what is last
    then is the reduction of one weight, and the pass looks again. Of all cuts it takes the one with which compute and
    link are done first, as far as costs tell. Between replicas an all_reduce follows each reduction, on its own link.

    Numerics: unchanged. Memory: what the deferred gradients are made of lives until then, where little else does.
    No-op: a graph without reductions, one rank, or where all compute leads to the last reduction.
    Limits: nothing moves across a write, an all_gather, or an op that draws random numbers. Blocks that are called as
        regions are moved as a whole or not at all; `CallRegions` puts the last one in line.
    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), which fills the gaps of pipelines so.
    """

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        if not tags.launches_of(gm.graph, collectives.REDUCTIONS):
            return False
        costs = _costs(gm.graph, ctx)
        changed = False
        while moved := _defer(gm.graph, costs):  # the last one is another one then
            ctx.note(*moved)
            changed = True
        return changed


class _Costs(NamedTuple):
    """Seconds of reductions and compute, and for each reduction of the all_reduces that follow it."""

    seconds: Mapping[fx.Node, float]
    between: Mapping[fx.Node, float]

    def of(self, launches: Iterable[fx.Node]) -> float:
        return sum(self.seconds[launch] + self.between[launch] for launch in launches)


def _costs(graph: fx.Graph, ctx: PassContext) -> _Costs:
    """Return the costs, without what is made of reduced gradients: it waits for them."""
    seconds = Timeline(sizes_of(graph, ctx.plan), ctx.hardware).seconds
    made_of: dict[fx.Node, fx.Node] = {}  # what is made of a reduced gradient -> the reduction
    between = dict.fromkeys(tags.launches_of(graph, collectives.REDUCTIONS), 0.0)
    for node in graph.nodes:
        reductions = [made_of.get(source, source) for source in node.all_input_nodes]
        if found := next((reduction for reduction in reductions if reduction in between), None):
            made_of[node] = found
            if node.target in collectives.ALL_REDUCES:
                between[found] += seconds[node]
    return _Costs({node: taken for node, taken in seconds.items() if node not in made_of}, between)


def _defer(graph: fx.Graph, costs: _Costs) -> tuple[fx.Node, str] | None:
    """Put behind the last reduction what hides the most; return it, and what that saves."""
    last = launch_groups.groups_of(graph, collectives.REDUCTIONS)[-1]
    needed, nodes = _made_of(last), list(graph.nodes)
    places = {node: i for i, node in enumerate(nodes)}
    cuts = [places[cut] for cut in _cuts(last, needed, costs)]
    if not cuts:
        return None
    fixed, tail = _run(nodes[: cuts[-1]], costs), nodes[cuts[-1] :]
    ends = {cut: max(_run(_parted(tail, cut - cuts[-1], needed), costs, *fixed)) for cut in cuts}
    first, before = min(cuts, key=ends.__getitem__), max(_run(tail, costs, *fixed))
    if ends[first] > before - _NOTHING:
        return None
    launch_groups.move(dict.fromkeys((node for node in nodes[first:-1] if node not in needed), graph.output_node()))
    saved = 1e6 * (before - ends[first])
    return last.launches[0], f"gradients that it does not need are computed behind it: {saved:,.0f} us"


def _parted(nodes: Sequence[fx.Node], cut: int, needed: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes, from the cut on with those first that are needed."""
    return [*nodes[:cut], *sorted(nodes[cut:], key=lambda node: node not in needed)]


def _run(
    nodes: Iterable[fx.Node], costs: _Costs, compute: float = 0.0, link: float = 0.0, between: float = 0.0
) -> tuple[float, float, float]:
    """Return when compute and the links have done these nodes, in seconds, if nothing is waited for.

    Gathers are left out: when a backward ends, they are done.
    """
    for node in nodes:
        if not collectives.is_launch(node) or launches.is_models_own(node):  # those are waited for where they are
            compute += costs.seconds.get(node, 0.0)
        elif node.target in collectives.REDUCTIONS:
            link = max(compute, link) + costs.seconds[node]
            if costs.between[node]:
                between = max(link, between) + costs.between[node]
    return compute, link, between


def _made_of(group: LaunchGroup) -> set[fx.Node]:
    found, todo = set(group.nodes), list(group.nodes)
    while todo:
        new = [source for source in todo.pop().all_input_nodes if source not in found]
        found.update(new)
        todo += new
    return found


def _cuts(last: LaunchGroup, needed: set[fx.Node], costs: _Costs) -> Iterator[fx.Node]:
    """Return the nodes from which on the others may go behind the last launch, the latest first.

    Up to the first that may not, or until twice as much would be deferred as the launch takes. The model's own
    collectives keep their order: none goes behind one that is needed.
    """
    enough, node = 2 * costs.of(last.launches), last.launches[-1].prev
    stays = False  # one of the model's own
    while (
        enough > 0
        and node.op != "placeholder"
        and not liveness.written_by(node)
        and (node in needed or _may_move(node))
        and not (stays and node not in needed and launches.is_models_own(node))
    ):
        stays |= node in needed and launches.is_models_own(node)
        if node not in needed and (taken := costs.seconds.get(node)):
            yield node
            enough -= taken
        node = node.prev


def _may_move(node: fx.Node) -> bool:
    """Return whether a node computes the same elsewhere, and is no all_gather, which HoistPrefetch places."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return launches.is_models_own(node) or not (
            target in collectives.GATHERS or torch.Tag.nondeterministic_seeded in target.tags
        )
    return target is operator.getitem
