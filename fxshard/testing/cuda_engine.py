"""Carries the transfers of an emulated link on a GPU; see [Note: the link on a GPU].

[Note: the link on a GPU]
All transfers go through one stream of the link, which is their order, as for a communicator of NCCL. Launching makes
that stream wait for the caller's, `wait()` makes the caller's stream wait for the transfer, and neither blocks the
host. If an operation is not asynchronous, torch calls `wait()` at once, in the stream that launched it. A work holds
inputs and outputs until it has been waited for; what takes their memory next comes later in a stream that waits.
All of it can be captured in a CUDA graph, once the kernels have been compiled.

What a transfer does to the data and how long it takes: [Note: paced copy]. What that kernel cannot copy (strided
tensors, products, sums of integers) torch does first, in the same stream and within the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import Event, Stream
from torch.distributed.distributed_c10d import Work

from fxshard.testing import cuda_kernel
from fxshard.testing.cpu_engine import CpuEngine, TransferWork, run_moves
from fxshard.testing.link_engine import LinkTransfer, Move, Speed

CTAS = 16
"""How many thread blocks copy, if nobody says."""


class _TimedTransfer(NamedTuple):
    op: str
    bytes: int
    seconds: float  # that it should take
    begin: Event
    end: Event


class CudaEngine:
    """Moves data in a stream of its own, at the pace of the link, CPU tensors at once; [Note: the link on a GPU]."""

    devices: tuple[str, ...] = ("cpu", "cuda")

    def __init__(self, speed: Speed, device: torch.device, ctas: int = CTAS) -> None:
        self.speed = speed
        self.ctas = ctas
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._side = Stream(self.device, priority=-1)
        self._clock = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._host = CpuEngine(Speed())
        self._records: list[_TimedTransfer] = []
        self._resolved: list[LinkTransfer] = []
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        self._compile()
        self._last, self._last_us = Event(enable_timing=True), 0.0
        self._last.record(self._side)

    @property
    def transfers(self) -> list[LinkTransfer]:
        """What has been launched outside of a capture; waits until all of it has arrived."""
        records, self._records = self._records, []
        if records:
            records[-1].end.synchronize()
        for op, num_bytes, seconds, begin, end in records:
            # From one to the next: an event tells the time since another in a float of 32 bits.
            self._last_us += self._last.elapsed_time(begin) * 1e3
            self._last = begin
            end_us = self._last_us + begin.elapsed_time(end) * 1e3
            self._resolved.append(LinkTransfer(op, num_bytes, self._last_us, end_us, seconds * 1e6))
        return self._resolved

    def clear(self) -> None:
        """Forget the transfers so far, without waiting for them."""
        self._records.clear()
        self._resolved.clear()

    def paced_us(self) -> float:
        """Return how long the last transfer took by the clock of its kernels, once they ran; waits for it."""
        self._side.synchronize()
        begin, end = self._clock.tolist()
        return float(end - begin) / 1e3

    def set_speed(self, speed: Speed, ctas: int | None) -> None:
        """Change the speed, and how many thread blocks copy unless that is `None`."""
        self.speed = speed
        self.ctas = self.ctas if ctas is None else ctas

    def close(self) -> None:
        """Wait for what has been launched."""
        self._side.synchronize()
        self._host.close()

    def launch(self, op: str, num_bytes: int, num_ranks: int, moves: Sequence[Move], outputs: Sequence[Tensor]) -> Work:
        """Launch as `Engine` says; a move that does not fit its tensors raises here."""
        if outputs and not any(tensor.is_cuda for tensor in outputs):
            return self._host.launch(op, num_bytes, num_ranks, moves, outputs)
        seconds = self.speed.seconds(op, num_bytes, num_ranks)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(), torch.cuda.stream(self._side):
            is_captured = torch.cuda.is_current_stream_capturing()
            begin, end = (Event(enable_timing=not is_captured) for _ in range(2))
            if not is_captured:
                begin.record(self._side)
            if self.speed.is_instant:
                run_moves(moves)
            else:
                self._carry(moves, seconds)
            end.record(self._side)
        if not is_captured:
            self._records.append(_TimedTransfer(op, num_bytes, seconds, begin, end))
        return _StreamWork(self._side, end, moves, outputs)

    def _carry(self, moves: Sequence[Move], seconds: float) -> None:
        """Launch what makes the side stream take so long and move the data meanwhile."""
        begin_ns, total_ns = round(self.speed.latency_us * 1e3), round(seconds * 1e9)
        carried = [move for move in moves if cuda_kernel.can_carry(move)]
        others = [move for move in moves if not cuda_kernel.can_carry(move)]
        if others:
            self._pause(is_first=True, to_ns=0)  # starts the clock
            run_moves(others)
        if not carried:
            self._pause(is_first=not others, to_ns=total_ns)
        num_bytes, sent, from_ns = sum(move.output.nbytes for move in carried), 0, begin_ns
        for position, move in enumerate(carried):
            is_first = position == 0 and not others
            sent += move.output.nbytes
            to_ns = begin_ns + (total_ns - begin_ns) * sent // num_bytes
            cuda_kernel.carry(move, self._clock, ctas=self.ctas, is_first=is_first, from_ns=from_ns, to_ns=to_ns)
            from_ns = to_ns

    def _pause(self, *, is_first: bool, to_ns: int) -> None:
        cuda_kernel.pause(self._clock, ctas=self.ctas, is_first=is_first, to_ns=to_ns)

    def _compile(self) -> None:
        """Compile what copies aligned tensors; the rest is compiled where it is met."""
        with torch.inference_mode(), torch.cuda.stream(self._side):
            two = torch.zeros(2, 64, dtype=torch.int32, device=self.device)
            cuda_kernel.carry(Move(*two), self._clock, ctas=1, is_first=True, from_ns=0, to_ns=0)
            self._pause(is_first=True, to_ns=0)
        self._side.synchronize()


class _StreamWork(TransferWork):
    def __init__(self, side: Stream, end: Event, moves: Sequence[Move], outputs: Sequence[Tensor]) -> None:
        super().__init__(outputs)
        self._side, self._end = side, end
        self._held: Sequence[Move] = moves

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream(self._side.device).wait_event(self._end)
        self._held = ()
        return True

    def is_completed(self) -> bool:
        return bool(self._end.query())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self._side.device])
        with torch.cuda.stream(self._side):  # who waits for the future waits for this stream, on the GPU
            future.set_result(list(self._outputs))
        return future

    def __del__(self) -> None:
        # Nobody has waited, so nothing else keeps the allocator from giving the memory to somebody else.
        for move in self._held:
            for tensor in (move.output, move.source):
                if tensor.is_cuda:
                    tensor.record_stream(self._side)
