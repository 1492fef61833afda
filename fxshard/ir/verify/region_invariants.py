"""The invariants of calls of regions; see [Note: regions]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fxshard.ir import regions, signature
from fxshard.ir.verify import baseline
from fxshard.ir.verify.baseline import Subject
from fxshard.ir.verify.invariants import Violation


def regions_are_called_as_they_were(subject: Subject) -> Iterator[Violation]:
    """A call of a region runs the code that it ran, its results are the same, and no two calls have one number."""
    calls = {node.name: node for node in subject.graph.nodes if regions.called_by(node)}
    for name, called in subject.baseline.calls.items():
        if name in calls and regions.called_by(calls[name]) != called:
            yield calls[name], f"it called {called}, and calls {regions.called_by(calls[name])}"
    nodes = {node.name: node for node in subject.graph.nodes}
    for name, (call, which) in baseline.results_of_calls(subject.graph).items():
        was_of, was = subject.baseline.results.get(name, (call, which))
        if was_of == call and was != which:
            yield nodes[name], f"it was result {was} of %{call}, and is result {which}"
    numbered = Counter((node.target, node.args[2]) for node in calls.values() if regions.is_call(node))
    for node in calls.values():
        if regions.is_call(node) and numbered[node.target, node.args[2]] > 1:
            yield node, f"another call has number {node.args[2]}, too: torch may make one of both"


def regions_read_what_they_were_traced_with(subject: Subject) -> Iterator[Violation]:
    """A region reads as many operands as its code takes, of its types, and once it is a subgraph, of its strides."""
    for node in subject.graph.nodes:
        code = regions.code_of(node)
        if code is None or not (regions.is_call(node) or regions.is_of_region(code)):
            continue
        given, places = regions.operands_of(node), code.graph.find_nodes(op="placeholder")
        if len(given) != len(places):
            yield node, f"it reads {len(given)} tensors, and its code takes {len(places)}"
        layout_of = signature.type_of if regions.is_call(node) else regions.layout_of
        for operand, place in zip(given, places, strict=False):
            if "val" in operand.meta and layout_of(operand) != layout_of(place):
                yield node, f"%{operand.name} is {layout_of(operand)}, and its code takes {layout_of(place)}"


def results_of_regions_share_no_memory(subject: Subject) -> Iterator[Violation]:
    """No result of a region lies in the memory of an operand or of another result: Inductor would write over it."""
    codes = {code: node for node in reversed(subject.graph.nodes) if (code := regions.code_of(node)) is not None}
    for code, call in codes.items():
        for index in regions.shared_results(code):
            yield call, f"result {index} lies in the memory of an operand or of another result"
