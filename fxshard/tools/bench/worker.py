"""The life of one rank of one system."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard.compile.auto_shard import units_of
from fxshard.testing.emulated_link import EmulatedLink, emulated_link
from fxshard.tools.bench import systems, traffic
from fxshard.tools.bench.config import BenchConfig, BenchJob
from fxshard.tools.bench.task import make_task
from fxshard.tools.bench.traffic import Traffic
from fxshard.tools.launch.rank_process import RankPlace, join, reporting


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A rank has compiled and warmed up, and waits for its turn.

    Attributes:
        num_params: of the whole model.
        num_units: that the systems shard it into.
        eps: distance of 1 to the next number of the dtype that the parameters have.
        first_step_s: seconds of the first step, compilation included.
        losses: of the first steps, on this rank's batch.
        traffic: of one step.
        unsharded_peak_bytes: of gathered parameters, where the system knows it.
        memory_peak_bytes: of all tensors on this rank's GPU, in the checked steps after the first; `None` on a CPU.
    """

    num_params: int
    num_units: int
    eps: float
    first_step_s: float
    losses: tuple[float, ...]
    traffic: dict[str, Traffic]
    unsharded_peak_bytes: int | None
    memory_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A rank has taken a timed step."""

    seconds: float


TURN, END = "turn", "end"  # what the parent says


def rank_main(place: RankPlace, job: BenchJob, parent: Connection) -> None:
    """Prepare a system on one rank, tell the parent, and take a timed step whenever it says so."""
    with reporting(place, job.out, parent):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(job.cache)
        with _group(place, job.config) as (mesh, link):
            _Rank(place.rank, job, mesh, link).serve(parent)


@contextlib.contextmanager
def _group(place: RankPlace, config: BenchConfig) -> Iterator[tuple[DeviceMesh, EmulatedLink | None]]:
    if config.group == "emulated":
        with _link(config) as link:
            yield link.mesh, link
        return
    join(place, config.ranks, device=config.device, stall_s=config.stall_s)
    yield init_device_mesh(config.device, (config.ranks,)), None
    dist.destroy_process_group()


def _link(config: BenchConfig) -> contextlib.AbstractContextManager[EmulatedLink]:
    on_link: dict[str, Any] = {"gigabytes_per_s": config.gigabytes_per_s, "latency_us": config.latency_us}
    if config.device == "cuda":
        torch.cuda.set_device(0)
        on_link |= {"device": "cuda", "ctas": config.ctas}
    return emulated_link(config.world_size, **on_link)


class _Rank:
    def __init__(self, rank: int, job: BenchJob, mesh: DeviceMesh, link: EmulatedLink | None) -> None:
        self._job = job
        self._link = link
        self._task = make_task(job.config, rank)
        parameters = list(self._task.model.parameters())
        self._num_params = sum(p.numel() for p in parameters)
        self._dtype = parameters[0].dtype
        self._num_units = len(units_of(self._task.model))
        self._trainer = systems.make_trainer(
            job.entry, self._task, mesh, job.config.lr, microbatches=job.config.microbatches
        )

    def serve(self, parent: Connection) -> None:
        parent.send(self._prepare())
        with contextlib.suppress(EOFError):  # the parent is gone
            while parent.recv() == TURN:
                parent.send(Timed(seconds=self._step()[0]))

    def _prepare(self) -> Ready:
        first_step_s, loss = self._step()
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()  # the first step allocates what compilation tries out
        losses = [loss, *(self._step()[1] for _ in range(self._job.config.check_steps - 1))]
        return Ready(
            num_params=self._num_params,
            num_units=self._num_units,
            eps=torch.finfo(self._dtype).eps,
            first_step_s=first_step_s,
            losses=tuple(losses),
            memory_peak_bytes=torch.cuda.max_memory_allocated() if self._is_cuda else None,
            traffic=self._traffic(),
            unsharded_peak_bytes=systems.unsharded_peak_bytes(self._job.entry, self._task.model),
        )

    def _step(self) -> tuple[float, float]:
        """Take a step that all ranks begin together; its seconds and its loss."""
        if self._job.config.ranks > 1:
            dist.barrier()
        self._synchronize()
        started = time.perf_counter()
        loss = self._trainer.step()
        self._synchronize()
        seconds = time.perf_counter() - started
        if self._link is not None:
            self._link.clear()
        return seconds, loss.item()

    def _traffic(self) -> dict[str, Traffic]:
        if self._link is None:
            return traffic.measure(self._trainer.step, self._dtype.itemsize)
        self._trainer.step()
        self._synchronize()
        return traffic.add_up((transfer.op, transfer.bytes) for transfer in self._link.transfers)

    @property
    def _is_cuda(self) -> bool:
        return self._job.config.device == "cuda"

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
