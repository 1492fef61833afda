"""Mutators of calls of regions: what a region computes is sound, and the call of it is not."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

import torch
from torch import fx

from fxshard.ir import regions
from tests.mutation.edits import Edit, alike, edit, insert, set_argument, swap_arguments


def call_another_region(graph: fx.Graph) -> Iterator[Edit]:
    """The code of another region that takes as many operands."""
    for one, other in itertools.combinations(_calls(graph), 2):
        as_many = len(regions.operands_of(one)) == len(regions.operands_of(other))
        if as_many and regions.called_by(one) != regions.called_by(other):
            yield one, edit(_call_as, one, other)


def read_another_result(graph: fx.Graph) -> Iterator[Edit]:
    """Another result of the same call, of the same type."""
    for call in _calls(graph):
        for one, other in alike([user for user in call.users if user.target is operator.getitem]):
            yield one, edit(swap_arguments, one, other, 1)


def swap_two_operands(graph: fx.Graph) -> Iterator[Edit]:
    """Two operands of one layout in each other's place."""
    for call in _calls(graph):
        for one, other in alike(list(dict.fromkeys(regions.operands_of(call)))):
            swapped = {one: other, other: one}
            yield call, edit(_read, call, [swapped.get(operand, operand) for operand in regions.operands_of(call)])


def read_the_operand_of_another_call(graph: fx.Graph) -> Iterator[Edit]:
    """What a call before it reads in this place."""
    for one, other in itertools.combinations(_calls(graph), 2):
        if regions.called_by(one) == regions.called_by(other):
            for i, (first, second) in enumerate(zip(regions.operands_of(one), regions.operands_of(other), strict=True)):
                if first is not second:
                    operands = regions.operands_of(other)
                    yield other, edit(_read, other, [*operands[:i], first, *operands[i + 1 :]])


def drop_an_operand(graph: fx.Graph) -> Iterator[Edit]:
    for call in _calls(graph):
        yield call, edit(_read, call, regions.operands_of(call)[:-1])


def read_an_operand_transposed(graph: fx.Graph) -> Iterator[Edit]:
    """The same shape with other strides; while it is no subgraph, that only puts it in line."""
    for call in itertools.filterfalse(regions.is_call, _calls(graph)):
        for i, operand in enumerate(regions.operands_of(call)):
            value = operand.meta["val"]
            if value.dim() == 2 and value.shape[0] == value.shape[1]:
                yield call, edit(_transpose, call, i)


def number_a_call_as_another(graph: fx.Graph) -> Iterator[Edit]:
    """As if both were one."""
    numbered = [call for call in _calls(graph) if regions.is_call(call)]
    for one, other in itertools.combinations(numbered, 2):
        if one.target is other.target:
            yield other, edit(set_argument, other, 2, one.args[2])


def give_an_operand_back(graph: fx.Graph) -> Iterator[Edit]:
    """As a result, in place of a tensor of the same layout."""
    for call in itertools.filterfalse(regions.is_call, _calls(graph)):
        code = regions.code_of(call)
        assert code is not None
        for i, result in enumerate(regions.results_of(code)):
            for place in code.graph.find_nodes(op="placeholder"):
                if regions.layout_of(place) == regions.layout_of(result):
                    yield call, edit(_return, call, i, place.name)


def _return(call: fx.Node, index: int, name: str) -> None:
    code, owner = regions.code_of(call), call.graph.owning_module
    assert code is not None
    assert owner is not None
    copy = regions.copied(code)  # mutants share the code that they do not change
    results = regions.results_of(copy)
    results[index] = next(node for node in copy.graph.nodes if node.name == name)
    copy.graph.output_node().args = (tuple(results),)
    with call.graph.inserting_before(call):
        call.args = (call.graph.get_attr(regions.add_code(owner, "mutant", copy)), *call.args[1:])


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if regions.called_by(node)]


def _read(call: fx.Node, operands: list[fx.Node]) -> None:
    call.args = (operands, *call.args[1:]) if regions.is_call(call) else (*call.args[:2], *operands)


def _call_as(one: fx.Node, other: fx.Node) -> None:
    if regions.is_call(one):
        one.target, one.args = other.target, (one.args[0], other.args[1], one.args[2])
    else:
        one.args = (*_code_of(one, other), *regions.operands_of(one))


def _code_of(one: fx.Node, other: fx.Node) -> tuple[fx.node.Argument, ...]:
    """The code of the other call, read in front of the first."""
    code = other.args[0]
    assert isinstance(code, fx.Node)
    with one.graph.inserting_before(one):
        return one.graph.get_attr(str(code.target)), other.args[1]


def _transpose(call: fx.Node, index: int) -> None:
    operands = regions.operands_of(call)
    operands[index] = insert(call, torch.ops.aten.t.default, operands[index])
    _read(call, operands)


MUTATORS = (
    call_another_region,
    read_another_result,
    swap_two_operands,
    read_the_operand_of_another_call,
    drop_an_operand,
    read_an_operand_transposed,
    number_a_call_as_another,
    give_an_operand_back,
)
