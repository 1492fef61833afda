"""Signatures of graphs that were traced twice: the same but for the names of sizes."""

from __future__ import annotations

from fxshard.compile.cache import CompiledFacts


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
