"""A copy on few thread blocks that takes as long as it is told; importing this needs triton.

[Note: paced copy]
Like a kernel of NCCL, it has few thread blocks (CTAs) that hold their SMs until the transfer has ended, it reads and
writes what such a transfer does, and it must wait for room beside the kernels that run. Unlike one, it knows when to
end: the clock is %globaltimer, in nanoseconds whatever the clock of the SMs does. Each CTA has its own slice of the
data and a due time for each block of it; it sleeps where it is early. The time counts from when a CTA is resident.

Several launches may share the time of one transfer: the first writes when it began to `clock[0]`, the others read it.
`clock[1]` is when the last one ended.

It uses triton because that comes with torch: torch.cuda._compile_kernel is private, wants the headers of a CUDA
toolkit, and passes whole numbers as 32 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxshard.testing.link_engine import Move

BLOCK = 16384
"""Elements that one CTA copies at a time: 64 KB in flight, for the latency of memory bounds what a CTA can carry."""

NUM_WARPS = 16
"""512 threads for each CTA."""

_SCALED = (torch.float32, torch.bfloat16, torch.float16)  # multiplied in float32 and rounded, as torch does


@triton.jit  # type: ignore[untyped-decorator] # triton is not always there when types are checked
def _wait_until(due: tl.tensor) -> None:
    now = tl.extra.cuda.globaltimer()
    while now < due:
        tl.inline_asm_elementwise("nanosleep.u32 100; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        now = tl.extra.cuda.globaltimer()


_AS_THEY_COME = ["is_first", "reads", "own", "writes", "from_ns", "block_ns", "to_ns"]


@triton.jit(do_not_specialize=_AS_THEY_COME)  # type: ignore[untyped-decorator]
def paced_copy(
    target: tl.tensor,
    source: tl.tensor,
    clock: tl.tensor,
    is_first: tl.int32,
    numel: tl.int64,
    share: tl.int64,
    reads: tl.int64,
    own: tl.int64,
    writes: tl.int64,
    scale: tl.float32,
    from_ns: tl.int64,
    block_ns: tl.int64,
    to_ns: tl.int64,
    IS_SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write one of the chunks of `source` into `target`, several times; see [Note: paced copy].

    `target` is [writes * numel], `source` [reads * numel]: all of it is read, as what arrives is, and its chunk `own`
    is written, multiplied by `scale` if IS_SCALED. The transfer begins now if `is_first`; else `clock` ([2], int64)
    says when it began. `from_ns`, before which no block is copied, and `to_ns`, the end of this launch, count from
    then. A CTA copies `share` elements of a chunk, a multiple of 16, in blocks of BLOCK that take `block_ns` each.
    """
    begun = tl.extra.cuda.globaltimer()
    if is_first != 0:
        tl.store(clock, begun)
    else:
        begun = tl.load(clock)
    due = begun + from_ns
    start = tl.program_id(0).to(tl.int64) * share
    for done in range(0, share, BLOCK):
        _wait_until(due)
        within = done + tl.arange(0, BLOCK)
        mask = (within < share) & (start + within < numel)
        value = tl.zeros([BLOCK], dtype=source.dtype.element_ty)
        for chunk in range(reads):
            found = tl.load(source + chunk * numel + start + within, mask=mask)
            value = tl.where(chunk == own, found, value)
        if IS_SCALED:
            value = (value.to(tl.float32) * scale).to(source.dtype.element_ty)
        for copy in range(writes):
            tl.store(target + copy * numel + start + within, value, mask=mask)
        due += block_ns
    _wait_until(begun + to_ns)
    tl.store(clock + 1, tl.extra.cuda.globaltimer())


def can_carry(move: Move) -> bool:
    """Return whether the kernel can do the move: the tensors are plain memory on a GPU, and not empty."""
    output, source, scale = move.output, move.source, move.scale
    if not (output.is_cuda and source.is_cuda and output.is_contiguous() and source.is_contiguous()):
        return False
    if source.is_conj() or source.is_neg() or output.is_conj() or output.is_neg():
        return False
    if output.dtype != source.dtype or output.numel() * move.reads != source.numel() * move.writes:
        return False
    if isinstance(scale, Tensor) or (scale != 1 and output.dtype not in _SCALED):
        return False
    return output.numel() > 0 and move.power == 1


def carry(move: Move, clock: Tensor, *, ctas: int, is_first: bool, from_ns: int, to_ns: int) -> None:
    """Launch the kernel for a move that it can do; `clock`, [2] int64, is one for all launches of a transfer."""
    is_scaled = move.scale != 1
    target, source = (tensor.view(-1).view(_unit(move)) for tensor in (move.output, move.source))
    numel = target.numel() // move.writes
    share = -(-numel // (16 * ctas)) * 16
    block_ns = (to_ns - from_ns) * min(BLOCK, share) // share
    paced_copy[(ctas,)](
        target,
        source,
        clock,
        int(is_first),
        numel,
        share,
        move.reads,
        move.own,
        move.writes,
        float(move.scale),
        from_ns,
        block_ns,
        to_ns,
        IS_SCALED=is_scaled,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def pause(clock: Tensor, *, ctas: int, is_first: bool, to_ns: int) -> None:
    """Launch the kernel to copy nothing until then; arguments as for `carry`."""
    nothing = clock.view(torch.int32)
    paced_copy[(ctas,)](
        nothing, nothing, clock, int(is_first), 0, 0, 0, 0, 0, 1.0, to_ns, 0, to_ns,
        IS_SCALED=False, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip


def _unit(move: Move) -> torch.dtype:
    """View the data as the kernel sees it: by value if it calculates, else in words as wide as all ends allow."""
    if move.scale != 1:
        return move.output.dtype
    ends = (move.output.nbytes // move.writes, move.output.data_ptr(), move.source.data_ptr())
    return torch.uint8 if any(end % 4 for end in ends) else torch.int32
