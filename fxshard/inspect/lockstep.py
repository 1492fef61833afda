"""Run a graph on real values for all ranks at once, in one process.

[Note: lockstep]
All ranks run the same graph, so one interpreter can walk it for all of them: at each node it computes the value of
every rank, and a collective is a function of the values that the ranks have there. That takes no process group, so a
live one is left alone. Reductions add in the order of the ranks; the network may add in another, but always the same
one is what comparing two graphs needs. Values that the network moves are exact either way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from fxshard.errors import UnsupportedGraph
from fxshard.ir import collectives

PerRank = tuple[Any, ...]
"""A value of each rank, rank 0 first."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a graph computed.

    Attributes:
        values: node name -> its value right after the node ran, inputs left out; only where the run was to keep them.
        results: the graph's results, in order.
    """

    values: dict[str, PerRank] = field(repr=False)
    results: list[PerRank] = field(repr=False)


def run(graph: fx.Graph, inputs: Mapping[str, PerRank], attributes: Mapping[str, Any], *, keep: bool) -> Run:
    """Run `graph` for all ranks; see [Note: lockstep].

    Args:
        graph: with explicit collectives.
        inputs: by the names of the placeholders; the graph may write into them.
        attributes: what its `get_attr` nodes read.
        keep: whether to keep a copy of every value.

    Raises:
        UnsupportedGraph: a collective that none of our passes inserts.
    """
    values: dict[fx.Node, PerRank] = {}
    kept: dict[str, PerRank] = {}
    num_ranks = len(next(iter(inputs.values()), (None,)))
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = inputs[node.name]
            elif node.op == "get_attr":
                values[node] = (attributes[node.target],) * num_ranks
            elif node.op != "output":
                values[node] = _call(node, values, num_ranks)
                if keep:
                    kept[node.name] = copied(values[node])
    results = graph.output_node().args[0]
    members = list(results) if isinstance(results, list | tuple) else [results]
    return Run(values=kept, results=[values[m] if isinstance(m, fx.Node) else (m,) * num_ranks for m in members])


def copied(value: Any) -> Any:
    """The value with copies of all tensors in it."""
    return tree_map_only(Tensor, Tensor.clone, value)


def _call(node: fx.Node, values: Mapping[fx.Node, PerRank], num_ranks: int) -> PerRank:
    def given(rank: int) -> tuple[Any, Any]:
        return map_arg((node.args, node.kwargs), lambda n: values[n][rank])

    ranks = [given(rank) for rank in range(num_ranks)]
    collective = _COLLECTIVES.get(node.target) if node.op == "call_function" else None
    if collective is not None and _spans(node, num_ranks):
        return collective([args for args, _ in ranks])
    namespace = getattr(node.target, "namespace", "")
    if "c10d" in namespace and node.target is not collectives.WAIT:
        raise UnsupportedGraph(
            f"%{node.name} is {node.target}: bisect_numerics can only run the collectives of fxshard's own passes, "
            f"over all {num_ranks} ranks. Bisect the part of the model that has no others."
        )
    if node.target is collectives.WAIT:
        return tuple(args[0] for args, _ in ranks)
    if node.op == "call_method":
        return tuple(operator.methodcaller(str(node.target), *args[1:], **kwargs)(args[0]) for args, kwargs in ranks)
    function: Any = node.target
    return tuple(function(*args, **kwargs) for args, kwargs in ranks)


def _spans(node: fx.Node, num_ranks: int) -> bool:
    """Whether a launch is over all ranks, and moves or averages."""
    given = node.args[1:]
    if node.target in collectives.REDUCTIONS:
        return given[:2] in (("sum", num_ranks), ("avg", num_ranks))
    return given[:1] == (num_ranks,)


def _gather(ranks: Sequence[tuple[Any, ...]]) -> PerRank:
    return tuple(torch.cat([args[0] for args in ranks]) for _ in ranks)


def _gather_all(ranks: Sequence[tuple[Any, ...]]) -> PerRank:
    shards = list(zip(*(args[0] for args in ranks), strict=True))
    return tuple([torch.cat(shard) for shard in shards] for _ in ranks)


def _reduce(ranks: Sequence[tuple[Any, ...]]) -> PerRank:
    total = ranks[0][0].clone()
    for args in ranks[1:]:
        total += args[0]
    if ranks[0][1] == "avg":
        total /= len(ranks)
    return tuple(part.clone() for part in total.chunk(len(ranks)))


def _reduce_all(ranks: Sequence[tuple[Any, ...]]) -> PerRank:
    tensors = range(len(ranks[0][0]))
    reduced = [_reduce([(args[0][i], *args[1:]) for args in ranks]) for i in tensors]
    return tuple(list(parts) for parts in zip(*reduced, strict=True))


_COLLECTIVES: dict[Any, Callable[[Sequence[tuple[Any, ...]]], PerRank]] = {
    collectives.ALL_GATHER: _gather,
    collectives.ALL_GATHER_COALESCED: _gather_all,
    collectives.REDUCE_SCATTER: _reduce,
    collectives.REDUCE_SCATTER_COALESCED: _reduce_all,
}
