"""Mutators of what makes parameters of gathered bytes: another scale, other bytes, another parameter's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import fx

from fxshard.ir import tags
from tests.mutation.edits import Edit, Mutator, alike, edit, parameters, read_instead, swap_readers


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in parameters(graph) if ".input" in str(tags.meta_of(node).param)]


def _metadata(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="placeholder") if ".metadata" in tags.meta_of(node).input]


def _decoded(graph: fx.Graph) -> list[fx.Node]:
    """The nodes on the way from bytes to a parameter, in order."""
    made = set(_inputs(graph))
    beside = set(_metadata(graph))
    for node in graph.nodes:
        sources = node.all_input_nodes
        if not made.isdisjoint(sources) and all(source in made or source in beside for source in sources):
            made.add(node)
    return [node for node in graph.nodes if node in made]


def decode_with_another_scale(graph: fx.Graph) -> Iterator[Edit]:
    """One reader of a scale reads that of another tensor, or of another parameter."""
    for one, other in itertools.permutations(_metadata(graph), 2):
        for reader in one.users:
            if reader.op != "output":
                yield reader, edit(read_instead, reader, one, other)


def swap_two_scales(graph: fx.Graph) -> Iterator[Edit]:
    for one, other in itertools.combinations(_metadata(graph), 2):
        yield one, edit(swap_readers, one, other)


def decode_other_bytes(graph: fx.Graph) -> Iterator[Edit]:
    """One tensor of a parameter is read twice, and another one not at all."""
    for one, other in alike(_inputs(graph)):
        for reader in one.users:
            yield reader, edit(read_instead, reader, one, other)


def read_what_was_made_of_others(graph: fx.Graph) -> Iterator[Edit]:
    """At each step from bytes to a parameter one is taken for another."""
    for one, other in alike(_decoded(graph)):
        yield one, edit(swap_readers, one, other)


MUTATORS: tuple[Mutator, ...] = (
    decode_with_another_scale,
    swap_two_scales,
    decode_other_bytes,
    read_what_was_made_of_others,
)
