"""Mutators of what keeps ranks in step that run other graphs: other zeros, and less than a whole shard."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxshard.ir import collectives, ops, tags
from tests.mutation.edits import Edit, Mutator, aten, edit, nodes_of, set_argument


def read_other_parameters_for_zeros(graph: fx.Graph) -> Iterator[Edit]:
    """In another order, or without one."""
    for node in nodes_of(graph, ops.ZERO_GRADIENT):
        parameters = node.all_input_nodes
        for order in (list(reversed(parameters)), parameters[1:], parameters[:-1]):
            yield node, edit(set_argument, node, 0, order)


def make_zeros_for_another_parameter(graph: fx.Graph) -> Iterator[Edit]:
    """They may have its shape."""
    for node in nodes_of(graph, ops.ZERO_GRADIENT):
        for index in range(len(node.all_input_nodes)):
            if index != node.args[1]:
                yield node, edit(set_argument, node, 1, index)


def gather_half_of_a_shard(graph: fx.Graph) -> Iterator[Edit]:
    """What this graph reads may all be there."""
    for launch in nodes_of(graph, collectives.ALL_GATHER):
        if tags.meta_of(launch).calls:
            yield launch, edit(_send_half, launch)


def _send_half(launch: fx.Node) -> None:
    sent = launch.all_input_nodes[0]
    with launch.graph.inserting_before(launch):
        half = launch.graph.call_function(aten.slice.Tensor, (sent, 0, 0, sent.meta["val"].numel() // 2))
    half.meta["val"] = sent.meta["val"][: sent.meta["val"].numel() // 2]
    launch.replace_input_with(sent, half)


MUTATORS: tuple[Mutator, ...] = (
    read_other_parameters_for_zeros,
    make_zeros_for_another_parameter,
    gather_half_of_a_shard,
)
