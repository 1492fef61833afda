"""Mutators of all_reduces over replicas: how shards of one gradient may drift apart, or be averaged wrongly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fxshard.ir import collectives
from tests.mutation.edits import Edit, Mutator, edit, index_of, insert, insert_like, nodes_of, set_argument

aten = torch.ops.aten


def all_reduce_again(graph: fx.Graph) -> Iterator[Edit]:
    """Once more what was averaged, or for nobody what was reduced."""
    for launch in nodes_of(graph, collectives.ALL_REDUCE):
        (wait,) = launch.users
        yield launch, edit(_again, launch, wait, wait)
        yield launch, edit(_again, launch, wait, launch.all_input_nodes[0])


def _again(launch: fx.Node, wait: fx.Node, sent: fx.Node) -> None:
    readers = list(wait.users) if sent is wait else []
    again = insert_like(wait, collectives.ALL_REDUCE, sent, *launch.args[1:])
    again.meta.update(launch.meta)
    waited = insert_like(again, collectives.WAIT, again)
    waited.meta.update(wait.meta)
    for reader in readers:
        reader.replace_input_with(wait, waited)


def reduce_over_another_axis(graph: fx.Graph) -> Iterator[Edit]:
    """A launch names the group of the other mesh axis."""
    found = nodes_of(graph, *collectives.LAUNCHES)
    groups = dict.fromkeys(collectives.group_of(launch) for launch in found)
    for launch in found:
        for group in groups:
            if group != collectives.group_of(launch):
                yield launch, edit(set_argument, launch, index_of(launch, "group_name"), group)


def change_what_is_all_reduced(graph: fx.Graph) -> Iterator[Edit]:
    """It is divided, doubled or negated before."""
    for launch in nodes_of(graph, *collectives.ALL_REDUCES):
        for wait in launch.all_input_nodes:
            yield launch, edit(_put_between, launch, wait, aten.div.Tensor, 2)
            yield launch, edit(_put_between, launch, wait, aten.add.Tensor, wait)
            yield launch, edit(_put_between, launch, wait, aten.neg.default)


def _put_between(launch: fx.Node, wait: fx.Node, target: object, *args: object) -> None:
    launch.replace_input_with(wait, insert_like(wait, target, wait, *args))


def divide_before_the_all_reduce(graph: fx.Graph) -> Iterator[Edit]:
    """A division that belongs behind it."""
    for launch in nodes_of(graph, collectives.ALL_REDUCE):
        (wait,) = launch.users
        for division in [node for node in wait.users if node.target in (aten.div.Tensor, aten.div.Scalar)]:
            yield division, edit(_divide_before, launch, wait, division)


def _divide_before(launch: fx.Node, wait: fx.Node, division: fx.Node) -> None:
    (sent,) = launch.all_input_nodes
    launch.replace_input_with(sent, insert(launch, division.target, sent, *division.args[1:]))
    division.replace_all_uses_with(wait)
    division.graph.erase_node(division)


MUTATORS: tuple[Mutator, ...] = (
    all_reduce_again,
    reduce_over_another_axis,
    change_what_is_all_reduced,
    divide_before_the_all_reduce,
)
