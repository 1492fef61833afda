"""Carries the transfers of an emulated link: now, or when the link would have; see [Note: emulated link]."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

SPIN_S = 1e-4
"""How long before its deadline a thread stops sleeping, which may last that much too long, and only yields."""


class Transfer(NamedTuple):
    """What the link has carried.

    Attributes:
        op: the collective, such as "all_gather".
        bytes: of all tensors, unsharded.
        start_us: when the link began, after it was made.
        end_us: when the data had arrived.
    """

    op: str
    bytes: int
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How long the link takes."""

    gigabytes_per_s: float
    latency_us: float

    @property
    def is_instant(self) -> bool:
        """Whether it takes no time at all."""
        return self.gigabytes_per_s == math.inf and self.latency_us == 0.0

    def seconds(self, op: str, num_bytes: int, num_ranks: int) -> float:
        """For a collective over tensors that have so many bytes when they are whole."""
        sent = num_bytes * (2 if op == "all_reduce" else 1) * (num_ranks - 1) / num_ranks
        return self.latency_us * 1e-6 + sent / (self.gigabytes_per_s * 1e9)


class Engine(Protocol):
    """Carries transfers; one per kind of device."""

    transfers: list[Transfer]

    def launch(
        self, op: str, num_bytes: int, num_ranks: int, move: Callable[[], None], outputs: Sequence[Tensor]
    ) -> Work:
        """Start `move`, which writes `outputs`; what it holds on to lives until the work has been waited for."""

    def close(self) -> None:
        """Carry what has been launched and stop."""


class InstantEngine:
    """Moves the data before `launch` returns, in the thread that calls it."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self._origin = time.perf_counter()

    def launch(
        self, op: str, num_bytes: int, num_ranks: int, move: Callable[[], None], outputs: Sequence[Tensor]
    ) -> Work:
        """As `Engine` says; an error in `move` is raised here."""
        start = time.perf_counter()
        with torch.inference_mode():  # outputs may be inference tensors, which refuse changes outside of it
            move()
        end = time.perf_counter()
        self.transfers.append(Transfer(op, num_bytes, (start - self._origin) * 1e6, (end - self._origin) * 1e6))
        return _DoneWork(outputs)

    def close(self) -> None:
        """Nothing is under way."""


class _DoneWork(Work):
    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: Any = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(list(self._outputs))
        return future


class TimedEngine:
    """Moves the data on a thread of its own, and keeps the clock of the link; see [Note: emulated link]."""

    def __init__(self, speed: Speed) -> None:
        self.transfers: list[Transfer] = []
        self._speed = speed
        self._origin = self._free_at = time.perf_counter()
        self._mover = futures.ThreadPoolExecutor(1, "fxshard-link")
        self.notifier = futures.ThreadPoolExecutor(1, "fxshard-link-futures")  # starts its thread when first used

    def launch(
        self, op: str, num_bytes: int, num_ranks: int, move: Callable[[], None], outputs: Sequence[Tensor]
    ) -> Work:
        """As `Engine` says; an error in `move` is raised by `wait`."""
        arrival = self._mover.submit(self._carry, op, num_bytes, num_ranks, move, time.perf_counter())
        return _TimedWork(self, arrival, outputs, move)

    def _carry(self, op: str, num_bytes: int, num_ranks: int, move: Callable[[], None], launched: float) -> float:
        """Move the data; when it arrives."""
        began = time.perf_counter()
        with torch.inference_mode():
            move()
        start = max(launched, self._free_at)
        end = start + max(self._speed.seconds(op, num_bytes, num_ranks), time.perf_counter() - began)
        self._free_at = end
        self.transfers.append(Transfer(op, num_bytes, (start - self._origin) * 1e6, (end - self._origin) * 1e6))
        return end

    def close(self) -> None:
        """Carry what has been launched and stop."""
        self._mover.shutdown()
        self.notifier.shutdown()


class _TimedWork(Work):
    def __init__(
        self,
        engine: TimedEngine,
        arrival: futures.Future[float],
        outputs: Sequence[Tensor],
        move: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._engine, self._arrival, self._outputs, self._inputs = engine, arrival, outputs, move

    def wait(self, timeout: Any = None) -> bool:
        _sleep_until(self._arrival.result())
        self._inputs = None  # only now, as a backend for accelerators does
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._arrival.done():
            return False
        return self._arrival.exception() is not None or time.perf_counter() >= self._arrival.result()

    def is_success(self) -> bool:
        return self.is_completed() and self._arrival.exception() is None

    def result(self) -> list[Tensor]:
        return list(self._outputs)

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
