"""Objects that do the collectives of a unit, as FSDP2's users write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Call = tuple[str, int, int, torch.dtype, str]
"""What an object was called with: what it does, elements out and in, dtype, operator."""


class Counting:
    """Keeps what it is called with, and has the group do it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.allocated: list[int] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append(size[0])
        return torch.empty(*size, dtype=dtype, device=device)

    def note(self, what: str, output: Tensor, input: Tensor, op: Any = "") -> None:
        self.calls.append((what, output.numel(), input.numel(), input.dtype, str(op)))


class CountingGather(Counting):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.note("gather", output_tensor, input_tensor)
        start = output_tensor.data_ptr() + group.rank() * input_tensor.nbytes
        assert (input_tensor.data_ptr(), async_op) == (start, False), "FSDP2 gathers in place"
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class CountingReduce(Counting):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self.note("reduce", output_tensor, input_tensor, op)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


class Bf16Gather(CountingGather):
    """Sends half of the bits, and finishes what it does behind the collective."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.note("gather", output_tensor, input_tensor)
        gathered = torch.empty_like(output_tensor, dtype=torch.bfloat16)
        work = dist.all_gather_into_tensor(gathered, input_tensor.bfloat16(), group=group, async_op=async_op)
        output_tensor.copy_(gathered)
        return work


class Int8Reduce(CountingReduce):
    """Sends eight bits, with one scale for the whole buffer: what is in one buffer decides every bit."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self.note("reduce", output_tensor, input_tensor, op)
        ranks = group.size()
        scale = input_tensor.abs().max().clamp(min=1e-12) / 127
        coded = (input_tensor / scale).round().to(torch.int8)
        scales, theirs = scale.new_empty(ranks), torch.empty_like(coded)
        dist.all_gather_into_tensor(scales, scale.view(1), group=group)
        dist.all_to_all_single(theirs, coded, group=group)
        total = (theirs.view(ranks, -1).to(scale.dtype) * scales.view(-1, 1)).sum(0)
        output_tensor.copy_(total / ranks if op == dist.ReduceOp.AVG else total)


class OneBuffer:
    """Gives the same memory again and again, as FSDP2 allows, and returns before the data is there."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.memory.numel() < size[0] or self.memory.dtype is not dtype:
            self.memory = torch.empty(*size, dtype=dtype, device=device)
        return self.memory[: size[0]]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)


class OneBufferReduce(Counting):
    """Sends from the same memory again and again, and returns before it has been sent."""

    def __init__(self, is_async: bool) -> None:
        super().__init__()
        self.memory, self.is_async = torch.empty(0), is_async

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append(size[0])
        if len(self.allocated) % 2 == 0:  # what it gives is second
            return torch.empty(*size, dtype=dtype, device=device)
        if self.memory.numel() < size[0]:
            self.memory = torch.empty(*size, dtype=dtype, device=device)
        return self.memory[: size[0]]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any) -> Any:
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=self.is_async)
        return work
