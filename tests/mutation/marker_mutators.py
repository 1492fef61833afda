"""Mutators of the joint graph: what a pass may do to the markers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.ir import ops
from tests.mutation.edits import (
    Edit,
    alike,
    compute_readers,
    copy_of,
    edit,
    markers,
    read_instead,
    replace,
    set_argument,
    swap_arguments,
    swap_readers,
)

aten = torch.ops.aten


def _unshards(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if ops.is_unshard(node)]


def _reduce_grads(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if ops.is_reduce_grad(node)]


def mark_another_shape(graph: fx.Graph) -> Iterator[Edit]:
    for marker in _unshards(graph):
        yield marker, edit(set_argument, marker, 3, [3, *marker.meta["val"].shape[1:]])


def mark_another_size(graph: fx.Graph) -> Iterator[Edit]:
    for marker in _reduce_grads(graph):
        yield marker, edit(set_argument, marker, 3, 7)


def mark_another_dtype(graph: fx.Graph) -> Iterator[Edit]:
    for marker in markers(graph):
        yield marker, edit(set_argument, marker, 4, torch.float16)


def mark_another_slot(graph: fx.Graph) -> Iterator[Edit]:
    for marker in markers(graph):
        for slot in sorted({0, 1, 9} - {ops.slot_of(marker)}):
            yield marker, edit(set_argument, marker, 2, slot)


def mark_another_unit(graph: fx.Graph) -> Iterator[Edit]:
    keys = sorted({ops.key_of(marker).unit for marker in markers(graph)} | {"nobody"})
    for marker in markers(graph):
        for unit in keys:
            if unit != ops.key_of(marker).unit:
                yield marker, edit(set_argument, marker, 1, str(ops.key_of(marker)._replace(unit=unit)))


def mark_another_shard(graph: fx.Graph) -> Iterator[Edit]:
    for marker in markers(graph):
        key = ops.key_of(marker)
        yield marker, edit(set_argument, marker, 1, str(key._replace(shard=key.shard + 1)))


def mark_another_call(graph: fx.Graph) -> Iterator[Edit]:
    for marker in _unshards(graph):
        yield marker, edit(set_argument, marker, 1, str(ops.key_of(marker)._replace(call="7")))


def mark_another_flat(graph: fx.Graph) -> Iterator[Edit]:
    for marker, given in itertools.product(_unshards(graph), graph.find_nodes(op="placeholder")):
        if given is not marker.args[0]:
            yield marker, edit(set_argument, marker, 0, given)


def forget_to_say_whether_to_gather_again(graph: fx.Graph) -> Iterator[Edit]:
    for marker in _unshards(graph):
        yield marker, edit(marker.meta.pop, "recompute")


def gather_again_where_it_is_kept(graph: fx.Graph) -> Iterator[Edit]:
    """And the other way round."""
    kept, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
    for marker in _unshards(graph):
        other = kept if marker.meta["recompute"] is again else again
        yield marker, edit(marker.meta.__setitem__, "recompute", other)


def read_a_marker_twice(graph: fx.Graph) -> Iterator[Edit]:
    """One reader of a parameter has a marker of its own."""
    for marker in _unshards(graph):
        for reader in compute_readers(marker):
            yield reader, edit(_read_again, marker, reader)


def _read_again(marker: fx.Node, reader: fx.Node) -> None:
    reader.replace_input_with(marker, copy_of(marker))


def swap_the_readers_of_two_markers(graph: fx.Graph) -> Iterator[Edit]:
    for one, other in alike(_unshards(graph)):
        yield one, edit(swap_readers, one, other)


def read_another_marker(graph: fx.Graph) -> Iterator[Edit]:
    for one, other in alike(_unshards(graph)):
        for reader in compute_readers(other):
            yield reader, edit(read_instead, reader, other, one)


def use_a_marker_before_it_is_there(graph: fx.Graph) -> Iterator[Edit]:
    for marker in _unshards(graph):
        if readers := compute_readers(marker):
            yield marker, edit(readers[0].append, marker)


def drop_a_marked_gradient(graph: fx.Graph) -> Iterator[Edit]:
    """A sum of the gradients of a shard is one of its terms."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for term in node.args if _is_sum(node) else ():
            yield node, edit(replace, node, term)


def _is_sum(node: fx.Node) -> bool:
    return all(isinstance(n, fx.Node) and (ops.is_reduce_grad(n) or _is_sum(n)) for n in node.args) and bool(node.args)


def add_a_marked_gradient_twice(graph: fx.Graph) -> Iterator[Edit]:
    for marker in _reduce_grads(graph):
        yield marker, edit(_add_again, marker)


def _add_again(marker: fx.Node) -> None:
    readers = list(marker.users)
    again = copy_of(marker)
    with marker.graph.inserting_after(again):
        total = marker.graph.call_function(aten.add.Tensor, (marker, again))
    total.meta["val"] = marker.meta["val"]
    for reader in readers:
        reader.replace_input_with(marker, total)


def read_one_marked_gradient_twice(graph: fx.Graph) -> Iterator[Edit]:
    """Without a marker more: the sum reads one twice."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if _is_sum(node):
            yield node, edit(set_argument, node, 0, node.args[1])


def swap_what_two_markers_reduce(graph: fx.Graph) -> Iterator[Edit]:
    found = _reduce_grads(graph)
    for one, other in itertools.combinations(found, 2):
        if ops.slot_of(one) != ops.slot_of(other) or ops.key_of(one).unit != ops.key_of(other).unit:
            yield one, edit(swap_arguments, one, other)


def swap_the_slots_of_two_markers(graph: fx.Graph) -> Iterator[Edit]:
    for one, other in itertools.combinations(_reduce_grads(graph), 2):
        if ops.slot_of(one) != ops.slot_of(other):
            yield one, edit(swap_arguments, one, other, 2)


def reduce_something_else(graph: fx.Graph) -> Iterator[Edit]:
    """A marker reduces an input of its gradient, not the gradient."""
    for marker in _reduce_grads(graph):
        (grad,) = marker.all_input_nodes
        for source in grad.all_input_nodes[:1]:
            yield marker, edit(marker.replace_input_with, grad, source)


def forget_that_a_marker_is_there(graph: fx.Graph) -> Iterator[Edit]:
    """A parameter is read as its flat."""
    for marker in _unshards(graph):
        yield marker, edit(replace, marker, marker.args[0])


MUTATORS = (
    mark_another_shape,
    mark_another_size,
    mark_another_dtype,
    mark_another_slot,
    mark_another_unit,
    mark_another_shard,
    mark_another_call,
    mark_another_flat,
    forget_to_say_whether_to_gather_again,
    gather_again_where_it_is_kept,
    read_a_marker_twice,
    swap_the_readers_of_two_markers,
    read_another_marker,
    use_a_marker_before_it_is_there,
    drop_a_marked_gradient,
    add_a_marked_gradient_twice,
    read_one_marked_gradient_twice,
    swap_what_two_markers_reduce,
    swap_the_slots_of_two_markers,
    reduce_something_else,
    forget_that_a_marker_is_there,
)
