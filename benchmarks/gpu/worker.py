"""The process that holds one system."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import fxshard
from benchmarks import state
from benchmarks.gpu import build, trace
from benchmarks.gpu.gate import Gate
from benchmarks.gpu.settings import INSTANT, OVERLAPPED, Link
from benchmarks.gpu.talk import (
    Answer,
    Command,
    Consolidate,
    Consolidated,
    End,
    Host,
    Job,
    Profile,
    Profiled,
    Refused,
    Turn,
    WarmUp,
)
from fxshard.testing import EmulatedLink
from fxshard.tools.bench.config import FXSHARD
from fxshard.tools.bench.traffic import Traffic
from fxshard.tools.bench.worker import Ready, SystemRank, Timed
from fxshard.tools.launch.rank_process import RankPlace, reporting

_CHECK_STEPS = 3


def rank_main(place: RankPlace, job: Job, parent: Connection) -> None:
    """Hold the system of `job` and do what the parent says, until there is nothing more or the parent is gone."""
    with reporting(place, job.out, parent):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(job.folder / "cache")
        os.environ["FXSHARD_CALIBRATE"] = "0"  # one schedule for all speeds of the link, which changes under it
        gate = Gate(job.folder / "gate")
        with build.open_link(job.world_size, job.device) as link, _for(job, gate), contextlib.suppress(EOFError):
            worker = Worker(job, link, gate)
            while not isinstance(command := parent.recv(), End):
                parent.send(worker.answer(command))


def _for(job: Job, gate: Gate) -> contextlib.AbstractContextManager[None]:
    """What one of the systems needs besides the others."""
    return build.estimable(job.device, gate) if job.entry.system == OVERLAPPED else contextlib.nullcontext()


class Worker(SystemRank):
    """A system on a link.

    Args:
        job: what to make.
        link: instant.
        gate: of all processes on the device.
    """

    link: EmulatedLink

    def __init__(self, job: Job, link: EmulatedLink, gate: Gate) -> None:
        self._job, self._gate = job, gate
        with gate.held():
            task = build.make_task(job.model, job.device, checkpointing=job.checkpointing)
            super().__init__(task, job.device, link, functools.partial(build.make_trainer, job, mesh=link.mesh))
            gc.collect()

    def answer(self, command: Command) -> Answer:
        """Do what was said."""
        match command:
            case WarmUp():
                return self._warm_up(command)
            case Turn():
                return self._turn(command)
            case Host():
                return self._host(command.steps)
            case Profile():
                return self._or_refused(functools.partial(self._profile, command))
            case Consolidate():
                return self._or_refused(functools.partial(self._consolidate, command.repeats))
            case End():
                raise AssertionError("the end is not a question")

    def _or_refused(self, do: Callable[[], Answer]) -> Answer:
        try:
            return do()
        except Exception as error:
            return Refused(error=f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            self._tidy()

    def _warm_up(self, command: WarmUp) -> Ready:
        start = time.perf_counter()
        self.trainer.microbatches = command.microbatches
        self._set_speed(INSTANT)
        with self._gate.held() if command.alone else contextlib.nullcontext():
            losses = tuple(self.trainer.step().item() for _ in range(_CHECK_STEPS))
        self._tidy()
        return self.ready(time.perf_counter() - start, losses)

    def _turn(self, turn: Turn) -> Timed:
        self.trainer.microbatches = turn.microbatches
        self._set_speed(turn.link)
        sent = sum(self.traffic()[0].values(), Traffic())
        for _ in range(turn.warm_up - 2):
            self.trainer.step()
        self.synchronize()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.trainer.step()  # the last one that is not timed: the device is at work when the first mark comes
        seconds = self._times(turn.steps)
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else None
        self._tidy()
        return Timed(seconds=seconds, peak_bytes=peak, traffic=sent)

    def _times(self, steps: int) -> list[float]:
        """Seconds from the end of a step to the end of the next, on the device's clock where it has one.

        Nobody waits between steps: as in training, the host may run ahead of the device.
        """
        if not self.on_gpu:
            marks = [time.perf_counter()]
            for _ in range(steps):
                self.trainer.step()
                marks.append(time.perf_counter())
            return [after - before for before, after in itertools.pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self.trainer.step()
            event.record()
        self.synchronize()
        return [1e-3 * before.elapsed_time(after) for before, after in itertools.pairwise(events)]

    def _host(self, steps: int) -> Timed:
        self._set_speed(INSTANT)
        for _ in range(2):
            self.trainer.step()
        seconds = [self._host_seconds() for _ in range(steps)]
        self._tidy()
        return Timed(seconds=seconds)

    def _host_seconds(self) -> float:
        """How long Python takes for the parts of a step, each begun when the device has nothing left to do."""
        spent = 0.0

        def timed(part: Callable[..., Any], *args: Any) -> Any:
            nonlocal spent
            self.synchronize()
            start = time.perf_counter()
            result = part(*args)
            spent += time.perf_counter() - start
            return result

        trainer = self.trainer
        with trainer.begin(True):
            loss = timed(trainer.task.loss, trainer.forward)
            timed(loss.backward)
        if trainer.after_backward is not None:
            timed(trainer.after_backward, trainer.task.model)
        timed(trainer.optimizer.step)
        timed(trainer.optimizer.zero_grad)
        return spent

    def _profile(self, command: Profile) -> Profiled:
        self._set_speed(command.link)
        for _ in range(2):
            self.trainer.step()
        self.synchronize()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        with profile(activities=activities) as profiler:
            for _ in range(command.steps):
                self.trainer.step()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        return Profiled(summary=trace.summary(events, command.steps, on_gpu=self.on_gpu))

    def _consolidate(self, repeats: int) -> Consolidated:
        """Everything to the CPU; sending to one rank is nothing that the link knows, so every rank gets it."""
        self._set_speed(INSTANT)
        model, optimizer = self.task.model, self.trainer.optimizer
        seconds, nbytes = [], 0
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            if self._job.entry.system == FXSHARD:
                full = fxshard.full_optim_state_dict(model, optimizer, recipient_rank=None)
            else:
                full = state.torchs(model, optimizer)
            self.synchronize()
            seconds.append(time.perf_counter() - start)
            nbytes = sum(leaf.nbytes for leaf in tree_leaves(full) if isinstance(leaf, Tensor))
            del full
        return Consolidated(seconds=seconds, bytes=nbytes)

    def _set_speed(self, link: Link) -> None:
        self.synchronize()
        build.set_speed(self.link, link, self._job.device)

    def _tidy(self) -> None:
        """Leave the device's memory to whose turn is next."""
        self.synchronize()
        self.link.clear()
        if self.on_gpu:
            torch.cuda.empty_cache()
