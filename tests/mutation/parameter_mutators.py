"""Mutators of what is made of a gathered buffer: how compute may get the wrong parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import fx

from fxshard.ir import ops, signature, tags
from tests.mutation.edits import (
    Edit,
    alike,
    chain_of,
    compute_readers,
    edit,
    insert_like,
    parameters,
    read_instead,
    replace,
    set_argument,
    set_results,
    slices,
    swap_readers,
)

aten = torch.ops.aten


def shift_a_slice(graph: fx.Graph) -> Iterator[Edit]:
    for node in slices(graph):
        start, end = node.args[2:4]
        for by in (-1, 1):
            if isinstance(start, int) and isinstance(end, int) and start + by >= 0:
                yield node, edit(_cut, node, start + by, end + by)


def start_a_slice_elsewhere(graph: fx.Graph) -> Iterator[Edit]:
    for node in slices(graph):
        if isinstance(node.args[2], int):
            yield node, edit(set_argument, node, 2, node.args[2] + 1)


def end_a_slice_elsewhere(graph: fx.Graph) -> Iterator[Edit]:
    for node in slices(graph):
        if isinstance(node.args[3], int):
            yield node, edit(set_argument, node, 3, node.args[3] - 1)


def slice_another_dim(graph: fx.Graph) -> Iterator[Edit]:
    for node in slices(graph):
        if node.meta["val"].dim() > 1:
            yield node, edit(set_argument, node, 1, 0)


def _cut(node: fx.Node, start: int, end: int) -> None:
    set_argument(node, 2, start)
    set_argument(node, 3, end)


def view_a_buffer_as_another_shape(graph: fx.Graph) -> Iterator[Edit]:
    """Rows and columns of a view on the way to a parameter change places."""
    for node in dict.fromkeys(n for parameter in parameters(graph) for n in chain_of(parameter)):
        sizes = node.args[1] if node.target == aten.view.default else ()
        if isinstance(sizes, list | tuple) and len(sizes) == 2 and sizes[0] != sizes[1]:
            yield node, edit(set_argument, node, 1, list(reversed(sizes)))


def skip_a_copy(graph: fx.Graph) -> Iterator[Edit]:
    for node in dict.fromkeys(n for parameter in parameters(graph) for n in chain_of(parameter)):
        if node.target == aten.clone.default:
            yield node, edit(replace, node, node.args[0])


def transpose_a_parameter(graph: fx.Graph) -> Iterator[Edit]:
    """The tag stays on what is now the transpose."""
    for node in parameters(graph):
        if node.meta["val"].dim() == 2:
            yield node, edit(_wrap, node, aten.t.default, True)


def transpose_behind_a_parameter(graph: fx.Graph) -> Iterator[Edit]:
    """Compute reads the transpose of what is tagged."""
    for node in parameters(graph):
        if node.meta["val"].dim() == 2:
            yield node, edit(_wrap, node, aten.t.default, False)


def scale_a_parameter(graph: fx.Graph) -> Iterator[Edit]:
    for node in parameters(graph):
        yield node, edit(_wrap, node, aten.mul.Tensor, False, 2)
        yield node, edit(_wrap, node, aten.mul.Tensor, True, 2)


def _wrap(node: fx.Node, target: object, tagged: bool, *args: object) -> None:
    readers = list(node.users)
    wrapped = insert_like(node, target, node, *args)
    for reader in readers:
        reader.replace_input_with(node, wrapped)
    if tagged:
        wrapped.meta[tags.KEY] = tags.meta_of(node)
        del node.meta[tags.KEY]


def swap_two_parameters(graph: fx.Graph) -> Iterator[Edit]:
    """Compute reads each of two parameters in the place of the other."""
    for one, other in alike(parameters(graph)):
        if tags.meta_of(one).param != tags.meta_of(other).param:
            yield one, edit(swap_readers, one, other)


def swap_two_parameters_and_their_tags(graph: fx.Graph) -> Iterator[Edit]:
    for one, other in alike(parameters(graph)):
        if tags.meta_of(one).param != tags.meta_of(other).param:
            yield one, edit(_swap_all, one, other)


def _swap_all(one: fx.Node, other: fx.Node) -> None:
    swap_readers(one, other)
    one.meta[tags.KEY], other.meta[tags.KEY] = other.meta[tags.KEY], one.meta[tags.KEY]


def read_one_of_two_parameters(graph: fx.Graph) -> Iterator[Edit]:
    """One reader reads another parameter of the same shape."""
    for one, other in alike(parameters(graph)):
        if tags.meta_of(one).param != tags.meta_of(other).param:
            for reader in compute_readers(other):
                yield reader, edit(read_instead, reader, other, one)


def read_the_parameter_of_another_call(graph: fx.Graph) -> Iterator[Edit]:
    """What was gathered for one call is read in another: after it should have been resharded."""
    for one, other in alike(parameters(graph)):
        if tags.meta_of(one).param == tags.meta_of(other).param:
            for reader in compute_readers(other):
                yield reader, edit(read_instead, reader, other, one)


def use_a_parameter_before_it_is_there(graph: fx.Graph) -> Iterator[Edit]:
    for node in parameters(graph):
        if readers := compute_readers(node):
            yield node, edit(readers[0].append, node)


def read_the_buffer_instead(graph: fx.Graph) -> Iterator[Edit]:
    """Compute reads what a parameter is made of: the copy, the slice, the buffer, the launch, the flat."""
    for node in parameters(graph):
        for source in chain_of(node)[1:]:
            yield source, edit(replace, node, source)


def save_a_parameter(graph: fx.Graph) -> Iterator[Edit]:
    """The graph returns an unsharded parameter in the place of something else."""
    results = signature.results_of(graph)
    for i, node in itertools.product(range(len(results)), parameters(graph)):
        yield node, edit(set_results, graph, [*results[:i], node, *results[i + 1 :]])


def forget_a_tag(graph: fx.Graph) -> Iterator[Edit]:
    """Nothing says any more that a node is a parameter."""
    for node in parameters(graph):
        yield node, edit(node.meta.pop, tags.KEY)


def leave_a_marker(graph: fx.Graph) -> Iterator[Edit]:
    for node in parameters(graph):
        if compute_readers(node):
            yield node, edit(_mark, node)


def _mark(node: fx.Node) -> None:
    flat = next(n for n in node.graph.nodes if tags.meta_of(n).shard)
    shape, dtype = list(node.meta["val"].shape), node.meta["val"].dtype
    key = f"{tags.meta_of(flat).shard}@0"
    marker = insert_like(node, ops.UNSHARD, flat, key, 0, shape, dtype)
    node.replace_all_uses_with(marker)


MUTATORS = (
    shift_a_slice,
    start_a_slice_elsewhere,
    end_a_slice_elsewhere,
    slice_another_dim,
    view_a_buffer_as_another_shape,
    skip_a_copy,
    transpose_a_parameter,
    transpose_behind_a_parameter,
    scale_a_parameter,
    swap_two_parameters,
    swap_two_parameters_and_their_tags,
    read_one_of_two_parameters,
    read_the_parameter_of_another_call,
    use_a_parameter_before_it_is_there,
    read_the_buffer_instead,
    save_a_parameter,
    forget_a_tag,
    leave_a_marker,
)
