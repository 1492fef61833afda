"""A variant of a graph runs in place of the plain one, also where tracing again saved a size more or less often."""

from __future__ import annotations

import dataclasses

import pytest

from fxshard.compile.cache import CompiledFacts
from fxshard.runtime.dispatch import GuardedCode

PLAIN = CompiledFacts(
    kind="backward",
    launches=(),
    trained={},
    reads={},
    inputs=("size: Sym(s1)", "twice: Sym(2*s1)", "x: f32[s1]", "y: f32[s1]"),
    outputs=("f32[s1]", "None"),
    layouts={},
)


def variant(*inputs: str, outputs: tuple[str, ...] = PLAIN.outputs) -> CompiledFacts:
    return dataclasses.replace(PLAIN, inputs=inputs, outputs=outputs)


def test_a_size_may_come_twice_or_not_at_all() -> None:
    more = variant(
        "other: Sym(s1)", "size: Sym(s1)", "x: f32[s1]", "y: f32[s1]", outputs=("f32[s1]", "Sym(s1)", "None")
    )
    assert more.aligned_with(PLAIN) == ([0, 0, 2, 3], [0, 2])


@pytest.mark.parametrize(
    "other",
    [
        variant("size: Sym(s1)", "y: f32[s1]", "x: f32[s1]"),
        variant("size: Sym(s1)", "x: f32[s1]"),
        variant("size: Sym(s2)", "x: f32[s1]", "y: f32[s1]"),
        variant("x: bf16[s1]", "y: f32[s1]"),
        variant("x: f32[s1]", "y: f32[s1]", outputs=("f32[s1]",)),
    ],
)
def test_anything_else_is_no_variant(other: CompiledFacts) -> None:
    assert other.aligned_with(PLAIN) is None


def test_code_gets_its_inputs_from_those_of_the_plain_one_and_gives_its_outputs() -> None:
    code = GuardedCode(lambda inputs: [*inputs, "more"], "backward", ()).aligned([0, 0, 2], 3, [3, 1])
    given = [7, 8, "x", "a variant's own"]
    assert code(given) == ["a variant's own", 7]
    assert given == []
