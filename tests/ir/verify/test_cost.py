"""The verifier's work grows with the graph and not faster: a rule that walks it anew for each slot is a fault."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from fxshard.ir.verify import verifier
from tests import graphs


def instructions(work: Callable[[], object]) -> int:
    """Count the bytecode instructions that this thread runs, without those of extension modules."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def work_on(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Instructions per invariant, over all passes of a step of so many layers that are units."""
    spent: dict[str, int] = {}

    def counted(invariant: verifier.Invariant) -> Any:
        def check(subject: Any) -> Any:
            found: list[Any] = []
            spent[invariant.name] = spent.get(invariant.name, 0) + instructions(
                lambda: found.extend(invariant.check(subject))
            )
            return found

        return dataclasses.replace(invariant, check=check)

    with monkeypatch.context() as patch:
        patch.setattr(verifier, "INVARIANTS", tuple(map(counted, verifier.INVARIANTS)))
        graphs.trace(graphs.Layers(num_layers), units=graphs.layers_of)
    return spent


def test_work_is_linear_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (work_on(num_layers, monkeypatch) for num_layers in (4, 40))
    steeper = {name: many[name] / few[name] for name in few if many[name] > 12 * few[name]}
    assert not steeper, steeper
    assert sum(many.values()) > 8 * sum(few.values())  # the longer graph has not been cut short
