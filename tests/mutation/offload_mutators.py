"""Mutators of copies between host and device: how a gather sends what is not there, or an optimizer reads it early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from fxshard.ir import collectives, ops, signature
from tests.mutation.edits import Edit, Mutator, alike, edit, nodes_of, set_argument, set_results, swap_arguments


def read_the_shard_on_the_host(graph: fx.Graph) -> Iterator[Edit]:
    """What is gathered is not copied, or not waited for."""
    for copy in nodes_of(graph, ops.COPY_TO_DEVICE):
        (wait,) = copy.users
        for reader in wait.users:
            for source in (copy.all_input_nodes[0], copy):
                yield copy, edit(reader.replace_input_with, wait, source)


def swap_two_copies_to_the_device(graph: fx.Graph) -> Iterator[Edit]:
    """A gather sends the shard of another unit, or of another call."""
    for one, other in alike(nodes_of(graph, ops.COPY_TO_DEVICE)):
        if one.args[0] is not other.args[0]:
            yield one, edit(swap_arguments, one, other)


def give_out_a_gradient_early(graph: fx.Graph) -> Iterator[Edit]:
    """The optimizer is given what is on the device, or a copy that nobody has waited for."""
    results = signature.results_of(graph)
    for i, result in enumerate(results):
        if (copy := ops.copy_to_host_behind(result)) is not None:
            for early in (copy, copy.args[0]):
                yield copy, edit(set_results, graph, [*results[:i], early, *results[i + 1 :]])


def leave_a_gradient_on_the_device(graph: fx.Graph) -> Iterator[Edit]:
    """The optimizer is given a gradient that is on another device than the shard."""
    for copy in nodes_of(graph, ops.COPY_TO_HOST):
        (wait,) = copy.users
        yield copy, edit(_without_copy, copy, wait)


def copy_to_another_place(graph: fx.Graph) -> Iterator[Edit]:
    """To another device, into other memory, or on another stream."""
    others: dict[Any, tuple[Any, ...]] = {
        ops.COPY_TO_DEVICE: ("meta", "to_host"),
        ops.COPY_TO_HOST: (True, "to_device"),
    }
    for copy in nodes_of(graph, *ops.BETWEEN_HOST_AND_DEVICE):
        for i, other in enumerate(others[copy.target], start=1):
            yield copy, edit(set_argument, copy, i, other)


def forget_the_wait_of_a_copy(graph: fx.Graph) -> Iterator[Edit]:
    """Whoever waited reads the copy itself."""
    for copy in nodes_of(graph, *ops.BETWEEN_HOST_AND_DEVICE):
        (wait,) = copy.users
        yield wait, edit(_without_wait, copy, wait)


def _without_wait(copy: fx.Node, wait: fx.Node) -> None:
    assert wait.target is collectives.WAIT
    wait.replace_all_uses_with(copy)
    wait.graph.erase_node(wait)


def _without_copy(copy: fx.Node, wait: fx.Node) -> None:
    wait.replace_all_uses_with(copy.all_input_nodes[0])
    wait.graph.erase_node(wait)
    copy.graph.erase_node(copy)


MUTATORS: tuple[Mutator, ...] = (
    read_the_shard_on_the_host,
    swap_two_copies_to_the_device,
    give_out_a_gradient_early,
    leave_a_gradient_on_the_device,
    copy_to_another_place,
    forget_the_wait_of_a_copy,
)
