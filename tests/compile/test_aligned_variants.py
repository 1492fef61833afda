"""A variant of a graph runs in place of the plain one: signatures are the same but for names and numbers of sizes."""

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


def signature(*inputs: str) -> list[str]:
    facts = CompiledFacts(
        kind="backward", launches=(), trained={}, reads={}, inputs=inputs, outputs=("f32[s3]",), layouts={}
    )
    return facts.signature


def test_another_trace_may_name_its_sizes_otherwise() -> None:
    assert signature("state: u8[s21]", "x: f32[s3, u1]") == signature("state: u8[s70]", "x: f32[s3, u0]")


def test_one_size_may_have_two_names_in_another_trace() -> None:
    """As torch 2.11 gives a tangent's, where data decides the size."""
    assert signature("n: Sym(u4)", "x: f32[u3, 12]") == signature("n: Sym(u0)", "x: f32[u0, 12]")


def test_a_size_that_was_a_number_is_another_signature() -> None:
    assert signature("x: f32[s1]") != signature("x: f32[4]")


def test_names_and_dtypes_are_no_sizes() -> None:
    assert signature("s21: f32[4]") != signature("s22: f32[4]")
    assert signature("x: u8[4]") != signature("x: u16[4]")
