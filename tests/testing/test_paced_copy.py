"""The kernel of the link on a GPU, without one: it compiles, copies in wide words, and moves the right values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernel needs triton, which comes with torch for CUDA")

WHOLE_NUMBERS = ("numel", "share", "reads", "own", "writes", "from_ns", "block_ns", "to_ns")


def ptx(pointer: str, *, is_aligned: bool, is_scaled: bool = False) -> str:
    """Of the kernel for such data, for an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    from fxshard.testing import cuda_kernel

    kernel: Any = cuda_kernel.paced_copy
    signature = {"target": pointer, "source": pointer, "clock": "*i64", "is_first": "i32", "scale": "fp32"}
    signature |= dict.fromkeys(WHOLE_NUMBERS, "i64") | dict.fromkeys(("IS_SCALED", "BLOCK"), "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    wide = ("target", "source", "clock", "numel", "share") if is_aligned else ("clock", "share")
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in wide}
    source = ASTSource(kernel, signature, {"IS_SCALED": is_scaled, "BLOCK": cuda_kernel.BLOCK}, attributes)
    compiled = compile_source(source, GPUTarget("cuda", 90, 32), {"num_warps": cuda_kernel.NUM_WARPS})
    return compiled.asm["ptx"]


@pytest.mark.parametrize("pointer", ["*i32", "*u8"])
def test_aligned_data_is_copied_in_words_of_16_bytes_at_the_pace_of_the_clock(pointer: str) -> None:
    text = ptx(pointer, is_aligned=True)
    assert "%globaltimer" in text
    assert "nanosleep.u32" in text
    assert "ld.global.v4.b32" in text
    assert "st.global.v4.b32" in text
    assert "bar.sync" not in text  # warps do not wait for each other


@pytest.mark.parametrize("pointer", ["*i32", "*u8", "*fp32"])
def test_data_that_is_not_aligned_compiles_too(pointer: str) -> None:
    assert "v4.b32" not in ptx(pointer, is_aligned=False)


@pytest.mark.parametrize("pointer", ["*fp32", "*bf16", "*fp16"])
def test_a_scaled_copy_multiplies_in_float32(pointer: str) -> None:
    text = ptx(pointer, is_aligned=True, is_scaled=True)
    assert "mul.f32" in text
    assert "st.global.v4.b32" in text


def test_the_kernel_moves_what_torch_would_when_it_is_interpreted() -> None:
    script = Path(__file__).with_name("interpreted_copy.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2])}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("equal")
