"""Mutators of launches and waits: how a pass may gather, wait or address its group wrongly."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from operator import getitem

import torch
from torch import Tensor, fx

from fxshard.ir import collectives, ops, signature, tags
from tests.mutation.edits import (
    GATHERS,
    Edit,
    alike,
    chain_of,
    copy_of,
    edit,
    index_of,
    insert,
    launch_nodes,
    nodes_of,
    parameters,
    read_instead,
    replace,
    set_argument,
    settle,
    swap_arguments,
    waits,
)

aten = torch.ops.aten


def drop_a_wait(graph: fx.Graph) -> Iterator[Edit]:
    """Everything that read the wait reads the launch."""
    for wait in waits(graph):
        yield wait, edit(replace, wait, wait.args[0])


def read_a_launch(graph: fx.Graph) -> Iterator[Edit]:
    """One reader of the wait reads the launch instead."""
    for wait in waits(graph):
        for reader in wait.users:
            yield reader, edit(read_instead, reader, wait, wait.args[0])


def defer_a_wait(graph: fx.Graph) -> Iterator[Edit]:
    """What is read in the graph, or is no gradient, is left on the link."""
    for wait in waits(graph):
        (source,) = wait.all_input_nodes
        launch = source.all_input_nodes[0] if source.target is getitem else source
        if launch.target not in (*collectives.REDUCTIONS, *collectives.ALL_REDUCES) or wait not in signature.results_of(
            graph
        ):
            yield wait, edit(setattr, wait, "target", ops.DEFERRED_WAIT)


def wait_twice(graph: fx.Graph) -> Iterator[Edit]:
    """A second wait for the same launch."""
    for wait in waits(graph):
        yield wait, edit(copy_of, wait)


def wait_for_a_wait(graph: fx.Graph) -> Iterator[Edit]:
    """A wait for what has been waited for."""
    for wait in waits(graph):
        yield wait, edit(_wait_for_wait, wait)


def _wait_for_wait(wait: fx.Node) -> None:
    again = copy_of(wait)
    wait.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    set_argument(again, 0, wait)


def move_a_wait_after_its_reader(graph: fx.Graph) -> Iterator[Edit]:
    for wait in waits(graph):
        reader = next(iter(wait.users))
        if reader.op != "output":
            yield wait, edit(reader.append, wait)


def move_a_launch_after_its_wait(graph: fx.Graph) -> Iterator[Edit]:
    for launch in launch_nodes(graph):
        yield launch, edit(next(iter(launch.users)).append, launch)


def move_a_launch_before_its_input(graph: fx.Graph) -> Iterator[Edit]:
    for launch in launch_nodes(graph):
        source = launch.all_input_nodes[0]
        if source.op != "placeholder":
            yield launch, edit(source.prepend, launch)


def drop_a_launch(graph: fx.Graph) -> Iterator[Edit]:
    """The wait waits for what the launch would have sent."""
    for launch in launch_nodes(graph):
        if launch.target not in collectives.COALESCED:
            yield launch, edit(replace, launch, launch.args[0])


def drop_launch_and_wait(graph: fx.Graph) -> Iterator[Edit]:
    """What the launch would have sent is read in its place."""
    for launch in launch_nodes(graph):
        if launch.target not in collectives.COALESCED:
            yield launch, edit(replace, next(iter(launch.users)), launch.args[0])


def swap_what_two_launches_send(graph: fx.Graph) -> Iterator[Edit]:
    for one, other in alike(nodes_of(graph, *GATHERS)):
        if one.args[0] != other.args[0]:
            yield one, edit(swap_arguments, one, other)


def swap_two_waits(graph: fx.Graph) -> Iterator[Edit]:
    """Each of two waits completes the other one's launch."""
    for one, other in alike(waits(graph)):
        yield one, edit(swap_arguments, one, other)


def swap_the_results_of_a_coalesced_launch(graph: fx.Graph) -> Iterator[Edit]:
    for launch in nodes_of(graph, *collectives.COALESCED):
        first, second, *_ = launch.users
        yield launch, edit(swap_arguments, first, second, 1)


def name_another_group(graph: fx.Graph) -> Iterator[Edit]:
    for launch in launch_nodes(graph):
        yield launch, edit(set_argument, launch, index_of(launch, "group_name"), "other")


def name_another_number_of_ranks(graph: fx.Graph) -> Iterator[Edit]:
    for launch in nodes_of(graph, *collectives.GATHERS, *collectives.REDUCTIONS):
        for world_size in (1, 8):
            yield launch, edit(set_argument, launch, index_of(launch, "group_size"), world_size)


def launch_over_the_group_of_another_unit(graph: fx.Graph) -> Iterator[Edit]:
    """Its name and its number of ranks, where units have several."""
    launches = nodes_of(graph, *collectives.GATHERS, *collectives.REDUCTIONS)
    groups = {collectives.group_of(launch): collectives.world_size_of(launch) for launch in launches}
    for launch in launches:
        for group, world_size in groups.items():
            if group != collectives.group_of(launch):
                yield launch, edit(_address, launch, group, world_size)


def _address(launch: fx.Node, group: str, world_size: int) -> None:
    set_argument(launch, index_of(launch, "group_name"), group)
    set_argument(launch, index_of(launch, "group_size"), world_size)


def name_another_operator(graph: fx.Graph) -> Iterator[Edit]:
    for launch in nodes_of(graph, *collectives.REDUCTIONS, *collectives.ALL_REDUCES):
        index = index_of(launch, "reduce_op")
        for operator in sorted({"sum", "avg", "max"} - {str(launch.args[index])}):
            yield launch, edit(set_argument, launch, index, operator)


def send_another_dtype(graph: fx.Graph) -> Iterator[Edit]:
    """A cast before the launch, which tells of it or does not."""
    for launch in launch_nodes(graph):
        for i, source in enumerate(launch.all_input_nodes):
            yield launch, edit(_cast, launch, i, True)
            yield source, edit(_cast, launch, i, False)


def _cast(launch: fx.Node, index: int, honest: bool) -> None:
    source = launch.all_input_nodes[index]
    cast = insert(launch, aten._to_copy.default, source, dtype=torch.float16)
    if not honest:
        cast.meta["val"] = source.meta["val"]
    launch.replace_input_with(source, cast)


def drop_the_cast_before_a_launch(graph: fx.Graph) -> Iterator[Edit]:
    casts = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
    for node in nodes_of(graph, *casts):
        if any(user.target in collectives.LAUNCHES for user in node.users):
            yield node, edit(replace, node, node.args[0])


def gather_twice(graph: fx.Graph) -> Iterator[Edit]:
    """One reader of the buffer has a gather of its own."""
    for wait in waits(graph):
        launch = wait.args[0]
        if isinstance(launch, fx.Node) and launch.target == collectives.ALL_GATHER:
            for reader in wait.users:
                yield reader, edit(_relaunch, wait, reader)


def reduce_twice(graph: fx.Graph) -> Iterator[Edit]:
    """A reduction is launched again, and its second result is the one that is used."""
    for launch in nodes_of(graph, collectives.REDUCE_SCATTER):
        wait = next(iter(launch.users))
        yield launch, edit(_relaunch, wait, next(iter(wait.users)))


def _relaunch(wait: fx.Node, reader: fx.Node) -> None:
    launch = wait.args[0]
    assert isinstance(launch, fx.Node)
    again = copy_of(launch)
    wait_again = copy_of(wait)
    set_argument(wait_again, 0, again)
    reader.replace_input_with(wait, wait_again)


def launch_for_nothing(graph: fx.Graph) -> Iterator[Edit]:
    """A second launch that is waited for and never read."""
    for wait in waits(graph):
        launch = wait.args[0]
        if isinstance(launch, fx.Node) and launch.target not in collectives.COALESCED and wait.users:
            yield launch, edit(_relaunch_for_nothing, wait)


def _relaunch_for_nothing(wait: fx.Node) -> None:
    launch = wait.args[0]
    assert isinstance(launch, fx.Node)
    again = copy_of(launch)
    set_argument(copy_of(wait), 0, again)


def launch_and_never_wait(graph: fx.Graph) -> Iterator[Edit]:
    for launch in launch_nodes(graph):
        yield launch, edit(copy_of, launch)


def launch_in_another_order(graph: fx.Graph) -> Iterator[Edit]:
    """Two gathers of different sizes."""
    for one, other in itertools.pairwise(nodes_of(graph, *GATHERS)):
        if signature.type_of(one) != signature.type_of(other):
            yield other, edit(one.prepend, other)


def gather_everything_first(graph: fx.Graph) -> Iterator[Edit]:
    """All parameters are alive at once."""
    if len(nodes_of(graph, *GATHERS)) > 1:
        yield parameters(graph)[0], edit(_gather_first, graph)


def _gather_first(graph: fx.Graph) -> None:
    first = next(node for node in graph.nodes if node.op == "call_function")
    chains = [list(reversed(chain_of(parameter))) for parameter in parameters(graph)]
    for node in dict.fromkeys(node for chain in chains for wait in chain[:1] for node in (wait.args[0], *chain)):
        if node is not first:
            first.prepend(node)
    settle(graph)


def claim_another_type(graph: fx.Graph) -> Iterator[Edit]:
    """What a node says of itself is not what running it gives."""
    for launch in launch_nodes(graph):
        wait = next(iter(launch.users))
        if isinstance(wait.meta["val"], Tensor):
            yield wait, edit(wait.meta.__setitem__, "val", wait.meta["val"].new_empty(3))


def read_zeros_instead_of_a_wait(graph: fx.Graph) -> Iterator[Edit]:
    """The launch stays, its wait and all that was made of it go: compute reads zeros."""
    for wait in waits(graph):
        yield wait, edit(_zeros_instead, wait)


def _zeros_instead(wait: fx.Node) -> None:
    zeros = insert(wait, aten.zeros.default, list(wait.meta["val"].shape))
    zeros.meta["val"] = wait.meta["val"]
    wait.replace_all_uses_with(zeros)
    wait.graph.erase_node(wait)


def run_a_launch_elsewhere(graph: fx.Graph) -> Iterator[Edit]:
    """A launch of what a side stream casts runs on the main stream, or on another one."""
    for launch in launch_nodes(graph):
        if tags.meta_of(launch).stream:
            yield launch, edit(functools.partial(tags.tag, launch, stream="elsewhere"))


def write_what_is_sent(graph: fx.Graph) -> Iterator[Edit]:
    """Something writes to what a launch sends, before it has been waited for."""
    for launch in launch_nodes(graph):
        yield launch, edit(_write_behind, launch)


def _write_behind(launch: fx.Node) -> None:
    sent = launch.all_input_nodes[0]
    with launch.graph.inserting_after(launch):
        launch.graph.call_function(aten.zero_.default, (sent,)).meta["val"] = sent.meta["val"]


MUTATORS = (
    run_a_launch_elsewhere,
    write_what_is_sent,
    drop_a_wait,
    defer_a_wait,
    read_a_launch,
    wait_twice,
    wait_for_a_wait,
    move_a_wait_after_its_reader,
    move_a_launch_after_its_wait,
    move_a_launch_before_its_input,
    drop_a_launch,
    drop_launch_and_wait,
    swap_what_two_launches_send,
    swap_two_waits,
    swap_the_results_of_a_coalesced_launch,
    name_another_group,
    name_another_number_of_ranks,
    launch_over_the_group_of_another_unit,
    name_another_operator,
    send_another_dtype,
    drop_the_cast_before_a_launch,
    gather_twice,
    reduce_twice,
    launch_for_nothing,
    launch_and_never_wait,
    read_zeros_instead_of_a_wait,
)

OF_ORDER = (launch_in_another_order, name_another_group, name_another_operator, reduce_twice, gather_twice)
"""What Inductor's own passes may do to launches."""

OF_MEMORY = (gather_everything_first,)
OF_TYPES = (claim_another_type,)
