"""Mutators of what forward keeps for a subgroup: other rows than backward takes them for."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxshard.ir import collectives, ops
from tests.mutation.edits import Edit, Mutator, edit, nodes_of, set_argument


def keep_other_parameters(graph: fx.Graph) -> Iterator[Edit]:
    """In another order, some twice, or those of another unit."""
    found = nodes_of(graph, ops.KEEP_ROWS)
    for kept in found:
        parameters = kept.all_input_nodes
        orders = [list(reversed(parameters)), [*parameters, parameters[0]], parameters[:-1]]
        orders += [other.all_input_nodes for other in found if other < kept]
        for order in orders:
            if order and order != parameters:
                yield kept, edit(set_argument, kept, 0, order)


def keep_for_other_ranks(graph: fx.Graph) -> Iterator[Edit]:
    """For more ranks, for another group, or as another unit's."""
    groups = dict.fromkeys(collectives.group_of(launch) for launch in nodes_of(graph, *collectives.LAUNCHES))
    found = nodes_of(graph, ops.KEEP_ROWS)
    for kept in found:
        yield kept, edit(set_argument, kept, 2, 4)
        for group in groups:
            yield kept, edit(set_argument, kept, 3, group)
        for other in found:
            if other is not kept:
                yield kept, edit(set_argument, kept, 1, other.args[1])


MUTATORS: tuple[Mutator, ...] = (keep_other_parameters, keep_for_other_ranks)
