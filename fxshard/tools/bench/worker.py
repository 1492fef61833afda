"""The life of one rank of one system."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard.testing.emulated_link import EmulatedLink, emulated_link
from fxshard.testing.link_engine import Speed
from fxshard.tools.bench import systems, traffic
from fxshard.tools.bench.config import BenchConfig, BenchJob
from fxshard.tools.bench.systems import Trainer
from fxshard.tools.bench.task import Task, make_task, units_of
from fxshard.tools.bench.traffic import Traffic
from fxshard.tools.launch.rank_process import RankPlace, join, reporting


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A rank has compiled and taken its first steps, and waits for its turn."""

    num_params: int  # of the whole model
    num_units: int  # that the systems shard it into
    eps: float  # distance of 1 to the next number of the dtype that the parameters have
    # seconds that compilation took: of the first step; on one GPU of all first steps and of waiting for it
    ready_s: float
    losses: tuple[float, ...]  # of the first steps, on this rank's batch
    traffic: dict[str, Traffic] = field(default_factory=dict)  # of one step
    unsharded_peak_bytes: int | None = None  # of gathered parameters, where the system knows it
    gathered_peak_bytes: int | None = None  # of what all_gathers brought, in one step on an emulated link
    # of all tensors on this rank's GPU, in the checked steps after the first; `None` on a CPU
    memory_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A rank has had its turn: seconds of each step, and the rest as in `Steps`."""

    seconds: list[float]
    peak_bytes: int | None = None
    traffic: Traffic = field(default_factory=Traffic)


class SystemRank:
    """A system on one rank, ready to take steps; `link` connects the ranks, `make` applies the system to the model."""

    def __init__(self, task: Task, device: str, link: EmulatedLink | None, make: Callable[[Task], Trainer]) -> None:
        self.task, self.link, self.on_gpu = task, link, device == "cuda"
        self.num_params = sum(p.numel() for p in task.model.parameters())
        self.num_units = len(units_of(task.model))
        self.dtype = next(task.model.parameters()).dtype
        self.trainer = make(task)

    def ready(self, ready_s: float, losses: Iterable[float], **known: Any) -> Ready:
        """What to tell the parent."""
        return Ready(
            num_params=self.num_params,
            num_units=self.num_units,
            eps=torch.finfo(self.dtype).eps,
            ready_s=ready_s,
            losses=tuple(losses),
            **known,
        )

    def traffic(self) -> tuple[dict[str, Traffic], int | None]:
        """Take a step; return its collectives, and the most that what they gathered took at once, if it is known."""
        if self.link is None:
            return traffic.measure(self.trainer.step, self.dtype.itemsize), None
        self.synchronize()
        self.link.clear()
        self.trainer.step()
        self.synchronize()
        found, gathered = traffic.of_link(self.link.transfers), self.link.gathered_peak_bytes
        self.link.clear()
        return found, gathered

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.on_gpu:
            torch.cuda.synchronize()


TURN, END = "turn", "end"  # what the parent says


def rank_main(place: RankPlace, job: BenchJob, parent: Connection) -> None:
    """Prepare a system on one rank, tell the parent, and take a timed step whenever it says so."""
    with reporting(place, job.out, parent):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(job.cache)
        with _group(place, job.config) as (mesh, link):
            _SteppingRank(place.rank, job, mesh, link).serve(parent)


@contextlib.contextmanager
def _group(place: RankPlace, config: BenchConfig) -> Iterator[tuple[DeviceMesh, EmulatedLink | None]]:
    if config.group == "emulated":
        with _link(config) as link:
            yield (link.mesh if config.replicas == config.tensor_parallel == 1 else _mesh_of_two_axes(config)), link
        return
    join(place, config.ranks, device=config.device, stall_s=config.stall_s)
    yield init_device_mesh(config.device, (config.ranks,)), None
    dist.destroy_process_group()


def _mesh_of_two_axes(config: BenchConfig) -> DeviceMesh:
    if config.tensor_parallel > 1:
        shape, names = (config.world_size // config.tensor_parallel, config.tensor_parallel), ("shard", "tp")
    else:
        shape, names = (config.replicas, config.world_size // config.replicas), ("replicate", "shard")
    return init_device_mesh(config.device, shape, mesh_dim_names=names)


def _link(config: BenchConfig) -> contextlib.AbstractContextManager[EmulatedLink]:
    on_link: dict[str, Any] = {"gigabytes_per_s": config.gigabytes_per_s, "latency_us": config.latency_us}
    if config.replicas > 1:
        shards = config.world_size // config.replicas
        between = Speed(gigabytes_per_s=config.between_gigabytes_per_s, latency_us=config.between_latency_us)
        on_link |= {"ranks_per_machine": shards, "between_machines": between}
    if config.device == "cuda":
        torch.cuda.set_device(0)
        on_link |= {"device": "cuda", "ctas": config.ctas}
    return emulated_link(config.world_size, **on_link)


class _SteppingRank(SystemRank):
    """Takes a step whenever its turn has come."""

    def __init__(self, rank: int, job: BenchJob, mesh: DeviceMesh, link: EmulatedLink | None) -> None:
        config = job.config
        split_over = mesh["tp"] if config.tensor_parallel > 1 else None
        make = functools.partial(
            systems.make_trainer,
            job.entry,
            mesh=mesh if split_over is None else mesh["shard"],
            lr=config.lr,
            microbatches=config.microbatches,
        )
        super().__init__(make_task(config, rank, split_over), config.device, link, make)
        self._job = job

    def serve(self, parent: Connection) -> None:
        parent.send(self._prepare())
        with contextlib.suppress(EOFError):  # the parent is gone
            while parent.recv() == TURN:
                *_, (seconds, _) = [self._step() for _ in range(1 + self._job.config.warm)]
                parent.send(Timed(seconds=[seconds]))

    def _prepare(self) -> Ready:
        config = self._job.config
        first_step_s, loss = self._step()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()  # the first step allocates what compilation tries out
        losses = [loss, *(self._step()[1] for _ in range(config.check_steps - 1))]
        memory_peak_bytes = torch.cuda.max_memory_allocated() if self.on_gpu else None
        found, gathered = self.traffic()
        return self.ready(
            first_step_s,
            losses,
            memory_peak_bytes=memory_peak_bytes,
            traffic=found,
            gathered_peak_bytes=gathered,
            unsharded_peak_bytes=systems.unsharded_peak_bytes(self._job.entry, self.task.model),
        )

    def _step(self) -> tuple[float, float]:
        """Take a step that all ranks begin together; its seconds and its loss."""
        if self._job.config.ranks > 1:
            dist.barrier()
        self.synchronize()
        started = time.perf_counter()
        loss = self.trainer.step()
        self.synchronize()
        seconds = time.perf_counter() - started
        if self.link is not None:
            self.link.clear()
        return seconds, loss.item()
