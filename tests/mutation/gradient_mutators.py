"""Mutators of gradients and results: how a gradient may be lost, doubled, misplaced or divided wrongly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxshard.ir import collectives, signature, tags
from tests.mutation.edits import (
    CONCATS,
    DIVISIONS,
    Edit,
    edit,
    gradient_concats,
    gradient_sums,
    insert,
    insert_like,
    leads_to_reduction,
    list_of,
    nodes_of,
    replace,
    set_argument,
    set_results,
)

aten = torch.ops.aten


# ---- before the reduction


def swap_two_gradients(graph: fx.Graph) -> Iterator[Edit]:
    """Two rows change places, whatever their shapes."""
    for node in gradient_concats(graph):
        rows = list_of(node)
        for i, j in itertools.combinations(range(len(rows)), 2):
            swapped = [rows[{i: j, j: i}.get(k, k)] for k in range(len(rows))]
            yield node, edit(set_argument, node, 0, swapped)


def drop_a_gradient(graph: fx.Graph) -> Iterator[Edit]:
    for node in gradient_concats(graph):
        rows = list_of(node)
        for i in range(len(rows)):
            yield node, edit(set_argument, node, 0, rows[:i] + rows[i + 1 :])


def send_a_gradient_twice(graph: fx.Graph) -> Iterator[Edit]:
    """One gradient in the row of another, or in a row more."""
    for node in gradient_concats(graph):
        rows = list_of(node)
        for i, row in enumerate(rows):
            yield node, edit(set_argument, node, 0, [row if k == i - 1 else r for k, r in enumerate(rows)] + [row][i:])
            yield node, edit(set_argument, node, 0, [*rows, row])


def drop_a_term(graph: fx.Graph) -> Iterator[Edit]:
    """Only one of the gradients of a parameter that is read twice is used."""
    for node in gradient_sums(graph):
        for term in node.args:
            yield node, edit(replace, node, term)


def add_a_term_twice(graph: fx.Graph) -> Iterator[Edit]:
    for node in gradient_sums(graph):
        for i in (0, 1):
            yield node, edit(set_argument, node, i, node.args[1 - i])


def subtract_a_term(graph: fx.Graph) -> Iterator[Edit]:
    for node in gradient_sums(graph):
        yield node, edit(setattr, node, "target", aten.sub.Tensor)
        yield node, edit(setattr, node, "kwargs", {"alpha": -1})


def cut_for_another_number_of_ranks(graph: fx.Graph) -> Iterator[Edit]:
    for node in nodes_of(graph, aten._chunk_cat.default):
        ranks = node.args[2]
        assert isinstance(ranks, int)
        for wrong in (1, ranks * 2):
            yield node, edit(set_argument, node, 2, wrong)


def cut_along_another_dim(graph: fx.Graph) -> Iterator[Edit]:
    for node in nodes_of(graph, *CONCATS):
        if any(leads_to_reduction(user) for user in node.users):
            yield node, edit(set_argument, node, 1, 1 - int(str(node.args[1])))


def scale_a_gradient(graph: fx.Graph) -> Iterator[Edit]:
    """A gradient is doubled on its way to its row."""
    for node in gradient_concats(graph):
        for row in list_of(node):
            yield row, edit(_before, node, row, aten.mul.Tensor, 2)


def cast_a_gradient(graph: fx.Graph) -> Iterator[Edit]:
    for node in gradient_concats(graph):
        rows = list_of(node)
        yield node, edit(_cast_all, node, rows)


def _cast_all(node: fx.Node, rows: list[fx.Node]) -> None:
    cast = [insert(node, aten._to_copy.default, row, dtype=torch.float16) for row in rows]
    set_argument(node, 0, cast)


def divide_before(graph: fx.Graph) -> Iterator[Edit]:
    for launch in nodes_of(graph, collectives.REDUCE_SCATTER):
        yield launch, edit(_before, launch, launch.args[0], aten.div.Tensor, 2)


def _before(reader: fx.Node, source: fx.Node, target: Any, factor: int) -> None:
    reader.replace_input_with(source, insert(reader, target, source, factor))


# ---- after it


def divide_after(graph: fx.Graph) -> Iterator[Edit]:
    for wait in _reduced(graph):
        for target in (aten.div.Tensor, aten.mul.Tensor):
            yield wait, edit(_behind, wait, target, 2)


def _behind(node: fx.Node, target: Any, *args: Any) -> None:
    readers = list(node.users)
    behind = insert_like(node, target, node, *args)
    for reader in readers:
        reader.replace_input_with(node, behind)


def _reduced(graph: fx.Graph) -> list[fx.Node]:
    """The waits for reductions, those of a coalesced launch among them."""
    results = [user for launch in nodes_of(graph, collectives.REDUCE_SCATTER_COALESCED) for user in launch.users]
    return [next(iter(node.users)) for node in (*nodes_of(graph, collectives.REDUCE_SCATTER), *results)]


def drop_a_division(graph: fx.Graph) -> Iterator[Edit]:
    for node in nodes_of(graph, *DIVISIONS):
        yield node, edit(replace, node, node.args[0])


def alter_a_division(graph: fx.Graph) -> Iterator[Edit]:
    for node in nodes_of(graph, *DIVISIONS):
        yield node, edit(set_argument, node, 1, 3)


def cast_a_reduced_gradient(graph: fx.Graph) -> Iterator[Edit]:
    """Through a dtype with fewer bits, or into one that the shard has not."""
    for wait in _reduced(graph):
        yield wait, edit(_cast_behind, wait, torch.float16)


def _cast_behind(wait: fx.Node, dtype: torch.dtype) -> None:
    readers = list(wait.users)
    cast = insert(wait.next, aten._to_copy.default, wait, dtype=dtype)
    cast.meta["val"] = wait.meta["val"]
    for reader in readers:
        reader.replace_input_with(wait, cast)


def take_another_piece(graph: fx.Graph) -> Iterator[Edit]:
    """A result is put together from the wrong pieces of the reduced buffers."""
    for node in nodes_of(graph, aten.cat.default):
        parts = list_of(node)
        if not any(leads_to_reduction(user) for user in node.users) and len(parts) > 1:
            yield node, edit(set_argument, node, 0, parts[::-1])


def add_a_gradient_to_a_reduced_one(graph: fx.Graph) -> Iterator[Edit]:
    for wait in _reduced(graph):
        yield wait, edit(_behind, wait, aten.add.Tensor, wait)


def never_reduce(graph: fx.Graph) -> Iterator[Edit]:
    """A rank keeps its own piece of its own gradient."""
    for launch in nodes_of(graph, collectives.REDUCE_SCATTER):
        yield launch, edit(_keep_local, launch)


def _keep_local(launch: fx.Node) -> None:
    wait = next(iter(launch.users))
    piece = insert(wait, aten.slice.Tensor, launch.args[0], 0, 0, wait.meta["val"].numel())
    wait.replace_all_uses_with(piece)
    wait.graph.erase_node(wait)
    launch.graph.erase_node(launch)


def return_zeros(graph: fx.Graph) -> Iterator[Edit]:
    """A gradient is reduced, and zeros are returned in its place."""
    for wait in _reduced(graph):
        yield wait, edit(_behind_zeros, wait)


def _behind_zeros(wait: fx.Node) -> None:
    readers = list(wait.users)
    zeros = insert_like(wait, aten.zeros.default, list(wait.meta["val"].shape))
    for reader in readers:
        reader.replace_input_with(wait, zeros)


# ---- the results of a graph


def return_none(graph: fx.Graph) -> Iterator[Edit]:
    yield from _with_result(graph, None)


def drop_a_result(graph: fx.Graph) -> Iterator[Edit]:
    results = signature.results_of(graph)
    for i, result in enumerate(results):
        yield _node_of(result, graph), edit(set_results, graph, [*results[:i], *results[i + 1 :]])


def return_one_result_twice(graph: fx.Graph) -> Iterator[Edit]:
    """In the place of another one of its type."""
    results = signature.results_of(graph)
    for i, j in itertools.permutations(range(len(results)), 2):
        if results[i] is not results[j] and signature.type_of(results[i]) == signature.type_of(results[j]):
            yield (
                _node_of(results[j], graph),
                edit(set_results, graph, [results[i] if k == j else r for k, r in enumerate(results)]),
            )


def swap_two_results(graph: fx.Graph) -> Iterator[Edit]:
    results = signature.results_of(graph)
    for i, j in itertools.combinations(range(len(results)), 2):
        if results[i] is not results[j]:
            swapped = [results[{i: j, j: i}.get(k, k)] for k in range(len(results))]
            yield _node_of(results[i], graph), edit(set_results, graph, swapped)


def return_an_input(graph: fx.Graph) -> Iterator[Edit]:
    """In the place of a result of its type."""
    for given in graph.find_nodes(op="placeholder"):
        alike = [r for r in signature.results_of(graph) if r is not given]
        for result in alike:
            if isinstance(result, fx.Node) and signature.type_of(result) == signature.type_of(given):
                yield result, edit(graph.output_node().replace_input_with, result, given)


def _with_result(graph: fx.Graph, value: Any) -> Iterator[Edit]:
    results = signature.results_of(graph)
    for i, result in enumerate(results):
        if isinstance(result, fx.Node):
            yield result, edit(set_results, graph, [*results[:i], value, *results[i + 1 :]])


def _node_of(result: Any, graph: fx.Graph) -> fx.Node:
    return result if isinstance(result, fx.Node) else graph.output_node()


def swap_the_tags_of_two_gradients(graph: fx.Graph) -> Iterator[Edit]:
    """A pass takes one gradient for another."""
    found = [node for node in graph.nodes if tags.meta_of(node).grads]
    for one, other in itertools.combinations(found, 2):
        if tags.meta_of(one).grads != tags.meta_of(other).grads:
            yield one, edit(_swap_tags, one, other)


def _swap_tags(one: fx.Node, other: fx.Node) -> None:
    one.meta[tags.KEY], other.meta[tags.KEY] = other.meta[tags.KEY], one.meta[tags.KEY]


MUTATORS = (
    swap_two_gradients,
    drop_a_gradient,
    send_a_gradient_twice,
    drop_a_term,
    add_a_term_twice,
    subtract_a_term,
    cut_for_another_number_of_ranks,
    cut_along_another_dim,
    scale_a_gradient,
    cast_a_gradient,
    divide_before,
    divide_after,
    drop_a_division,
    alter_a_division,
    cast_a_reduced_gradient,
    take_another_piece,
    add_a_gradient_to_a_reduced_one,
    never_reduce,
    return_zeros,
    return_none,
    drop_a_result,
    return_one_result_twice,
    swap_two_results,
    return_an_input,
    swap_the_tags_of_two_gradients,
)
