"""Carries the transfers of an emulated link on the CPU: now, or when the link would have; see [Note: emulated link]."""
# ruff: noqa: D102 (most methods are those of torch's Work)

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fxshard.testing.link_engine import LinkTransfer, Move, Speed

SPIN_S = 1e-4
"""How long before its deadline a thread stops sleeping, which may last that much too long, and only yields."""


class CpuEngine:
    """Moves data in the thread that launches if the link is instant, else on a thread of its own."""

    devices: tuple[str, ...] = ("cpu",)

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.transfers: list[LinkTransfer] = []
        self._origin = self._free_at = time.perf_counter()
        self._mover = futures.ThreadPoolExecutor(1, "fxshard-link")  # both start their thread when first used
        self.notifier = futures.ThreadPoolExecutor(1, "fxshard-link-futures")

    def launch(self, op: str, num_bytes: int, num_ranks: int, moves: Sequence[Move], outputs: Sequence[Tensor]) -> Work:
        """Launch as `Engine` says; an error in a move is raised here if the link is instant, else by `wait`."""
        launched = time.perf_counter()
        if self.speed.is_instant:
            run_moves(moves)
            self._record(op, num_bytes, 0.0, launched, time.perf_counter())
            return TransferWork(outputs)
        seconds = self.speed.seconds(op, num_bytes, num_ranks)
        arrival = self._mover.submit(self._carry, op, num_bytes, seconds, moves, launched)
        return _TimedWork(self, arrival, outputs, moves)

    def set_speed(self, speed: Speed, ctas: int | None) -> None:
        """Change the speed, once what is under way has arrived; there are no `ctas` here."""
        self._mover.submit(lambda: None).result()
        _sleep_until(self._free_at)
        self.speed = speed

    def clear(self) -> None:
        """Forget the transfers so far."""
        self.transfers.clear()

    def close(self) -> None:
        """Carry what has been launched and stop."""
        self._mover.shutdown()
        self.notifier.shutdown()

    def _carry(self, op: str, num_bytes: int, seconds: float, moves: Sequence[Move], launched: float) -> float:
        began = time.perf_counter()
        run_moves(moves)
        start = max(launched, self._free_at)
        end = self._free_at = start + max(seconds, time.perf_counter() - began)
        self._record(op, num_bytes, seconds, start, end)
        return end

    def _record(self, op: str, num_bytes: int, seconds: float, start: float, end: float) -> None:
        times = (1e6 * each for each in (start - self._origin, end - self._origin, seconds))
        self.transfers.append(LinkTransfer(op, num_bytes, *times))


def run_moves(moves: Sequence[Move]) -> None:
    """Do them in the current stream."""
    with torch.inference_mode():  # outputs may be inference tensors, which refuse changes outside of it
        for move in moves:
            move.run()


class TransferWork(Work):
    """A transfer that has arrived; what is still under way derives from it."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: Any = None) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[Tensor]:
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(list(self._outputs))
        return future


class _TimedWork(TransferWork):
    def __init__(
        self, engine: CpuEngine, arrival: futures.Future[float], outputs: Sequence[Tensor], moves: Sequence[Move]
    ) -> None:
        super().__init__(outputs)
        self._engine, self._arrival = engine, arrival
        self._held: Sequence[Move] | None = moves

    def wait(self, timeout: Any = None) -> bool:
        _sleep_until(self._arrival.result())
        self._held = None  # only now, as a backend for accelerators does
        return True

    def is_completed(self) -> bool:
        if not self._arrival.done():
            return False
        return self._arrival.exception() is not None or time.perf_counter() >= self._arrival.result()

    def is_success(self) -> bool:
        return self.is_completed() and self._arrival.exception() is None

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._engine.notifier.submit(self._resolve, future)
        return future

    def _resolve(self, future: torch.futures.Future[list[Tensor]]) -> None:
        try:
            self.wait()
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type] # the stubs of 2.13 want a result here
        else:
            future.set_result(list(self._outputs))


def _sleep_until(deadline: float) -> None:
    while (left := deadline - time.perf_counter()) > 0:
        if left > SPIN_S:
            time.sleep(left - SPIN_S)
        else:
            os.sched_yield()  # time.sleep(0) lasts far longer
