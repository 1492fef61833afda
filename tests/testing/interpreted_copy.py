"""Run the kernel of the link on a GPU in triton's interpreter, on the CPU, and compare with `Move.run`.

Started by test_paced_copy.py, as the interpreter is chosen by the environment: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from fxshard.testing import cuda_kernel
from fxshard.testing.link_engine import Move

CLOCK_STEP_NS = 1000


def make_clock_tick() -> None:
    """The interpreter has no inline assembler; every look at the clock lets time pass, and a nap returns at once."""
    ticks = itertools.count(1)

    def look() -> Any:
        time = np.array([next(ticks) * CLOCK_STEP_NS], dtype=np.int64)
        return tl.tensor(interpreter.TensorHandle(time, tl.int64), tl.int64)

    def nap(self: Any, *args: Any) -> Any:
        return Handles(interpreter.TensorHandle(np.zeros(1, dtype=np.int32), tl.int32))

    as_before = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        as_before(tensor, scope)
        scope.set_attr(
            tensor, "__index__", lambda self: self.handle.data.item()
        )  # numpy may convert only arrays of no dimension

    interpreter._patch_lang_tensor = patch
    tl.extra.cuda.globaltimer = look
    interpreter.InterpreterBuilder.create_inline_asm = nap


@dataclasses.dataclass
class Handles:
    """What the frontend asks for the results of inline assembler."""

    found: Any

    def get_result(self, index: int) -> Any:
        return self.found


def check(move: Move, ctas: int) -> None:
    """Of the kernel and of torch."""
    expected = move._replace(output=torch.zeros_like(move.output), source=move.source.clone())
    expected.run()
    clock = torch.zeros(2, dtype=torch.int64)
    cuda_kernel.carry(move, clock, ctas=ctas, is_first=True, from_ns=5_000, to_ns=50_000)
    assert torch.equal(move.output, expected.output), (move, ctas)
    begin, end = clock.tolist()
    assert end - begin >= 50_000, (begin, end)


def moves(numel: int, dtype: torch.dtype) -> list[Move]:
    """A gather, one off its alignment, and reductions of every kind that the kernel knows."""

    def values(count: int) -> Tensor:
        return (torch.arange(count) % 13).to(dtype)

    found = [
        Move(values(3 * numel) * 0, values(numel), writes=3),
        Move((values(2 * numel + 1) * 0)[1:], values(numel + 1)[1:], writes=2),
        Move(values(numel) * 0, values(4 * numel), reads=4, own=2),
    ]
    if dtype in (torch.float32, torch.float16):  # numpy, which interprets, has no bfloat16
        found.append(Move(values(numel) * 0, values(2 * numel), 2.0, reads=2, own=1))
    return found


def main() -> None:
    """Small and large, aligned and not."""
    make_clock_tick()
    for dtype, numel in itertools.product((torch.float32, torch.float16, torch.int8), (1, 7, 64, 20_000)):
        for move, ctas in itertools.product(moves(numel, dtype), (1, 3)):
            check(move, ctas)
    print("equal")


if __name__ == "__main__":
    main()
