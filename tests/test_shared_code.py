"""Signatures of graphs that were traced twice: the same but for the names of sizes, which are numbered."""

from __future__ import annotations

from fxshard.shared_code import Facts


def signature(*inputs: str) -> list[str]:
    facts = Facts(kind="backward", launches=(), trained={}, reads={}, inputs=inputs, outputs=("f32[s3]",), orders={})
    return facts.signature


def test_another_trace_may_name_its_sizes_otherwise() -> None:
    assert signature("state: u8[s21]", "x: f32[s3, u1]") == signature("state: u8[s70]", "x: f32[s3, u0]")


def test_sizes_that_were_one_or_two_stay_so() -> None:
    assert signature("x: f32[s1, s2]") != signature("x: f32[s1, s1]")
    assert signature("x: f32[s1, s3]") != signature("x: f32[s3, s1]")  # s3 is the output's


def test_names_and_dtypes_are_no_sizes() -> None:
    assert signature("s21: f32[4]") != signature("s22: f32[4]")
    assert signature("x: u8[4]") != signature("x: u16[4]")
