"""Mutators of the ops that the codegen stage puts in: how a launch may send something else than it did before."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fxshard.ir import collectives, ops, tags
from tests.mutation import collective_mutators
from tests.mutation.edits import Edit, edit, insert, list_of, nodes_of, set_argument

ON_STREAM = (ops.ALL_GATHER_ON_STREAM, ops.REDUCE_SCATTER_ON_STREAM)


def take_another_part(graph: fx.Graph) -> Iterator[Edit]:
    """As many elements of the flat, from one further on."""
    for launch in nodes_of(graph, ops.PREFETCHED_ALL_GATHER):
        starts = collectives.arguments_of(launch)["starts"]
        yield launch, edit(set_argument, launch, 2, [start + 1 for start in starts])


def take_more(graph: fx.Graph) -> Iterator[Edit]:
    """One element more than before."""
    for launch in nodes_of(graph, ops.PREFETCHED_ALL_GATHER):
        numels = collectives.arguments_of(launch)["numels"]
        yield launch, edit(set_argument, launch, 3, [numel + 1 for numel in numels])


def take_another_flat(graph: fx.Graph) -> Iterator[Edit]:
    """A part of another unit's flat."""
    flats = [node for node in graph.nodes if tags.meta_of(node).shard]
    for launch in nodes_of(graph, ops.PREFETCHED_ALL_GATHER):
        for flat in flats:
            if flat is not launch.args[0]:
                yield launch, edit(set_argument, launch, 0, flat)


def cast_to_another_dtype(graph: fx.Graph) -> Iterator[Edit]:
    """The op casts what it sends to another dtype than before."""
    for launch in nodes_of(graph, ops.PREFETCHED_ALL_GATHER, *ON_STREAM):
        yield launch, edit(set_argument, launch, 1, torch.float16)


def send_something_else(graph: fx.Graph) -> Iterator[Edit]:
    """The op sends what something was made of its first input."""
    for launch in nodes_of(graph, *ON_STREAM):
        yield launch, edit(_negate, launch)


def _negate(launch: fx.Node) -> None:
    first, *others = list_of(launch)
    set_argument(launch, 0, [insert(launch, torch.ops.aten.neg.default, first), *others])


def run_twice(graph: fx.Graph) -> Iterator[Edit]:
    """The op stands there a second time, and nobody waits for it."""
    for launch in nodes_of(graph, ops.PREFETCHED_ALL_GATHER, *ON_STREAM):
        yield launch, edit(_again, launch)


def _again(launch: fx.Node) -> None:
    with launch.graph.inserting_after(launch):
        again = launch.graph.node_copy(launch, lambda source: source)
    again.meta = dict(launch.meta)


MUTATORS = (
    take_another_part,
    take_more,
    take_another_flat,
    cast_to_another_dtype,
    send_something_else,
    run_twice,
    collective_mutators.drop_a_wait,
    collective_mutators.read_a_launch,
    collective_mutators.name_another_group,
    collective_mutators.name_another_number_of_ranks,
    collective_mutators.name_another_operator,
    collective_mutators.write_what_is_sent,
)
