"""What one configuration of a run costs: its step, and what the step holds."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxshard.cost.optimizer_step import OptimizerCost
from fxshard.cost.sizes import sizes_of
from fxshard.cost.step import COMPUTE, Clock, GraphOfStep, Interval
from fxshard.cost.step_memory import GraphMemory, MemoryUse, StepMemory, forward_memory, memory_of_step
from fxshard.cost.step_record import StepRecord
from fxshard.cost.timeline import Timeline
from fxshard.hardware import HardwareSpec, describes
from fxshard.inspect.explanation import Explanation, FrameExplanation
from fxshard.ir.planned_block import number_of
from fxshard.options import parse
from fxshard.plan.outline import OutlinedModel, backward_numbers

GIB = 2**30
_CLIPPED = 3  # to clip, gradients are read twice and written


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule:
    """How the blocks of a model run; what is around them runs uncompiled."""

    options: Mapping[str, Any]  # of the backend
    # whether a compiler fuses the pointwise ops of blocks; without, forward keeps what autograd keeps
    fuses: bool = True
    is_fsdp2: bool = False  # whether parameters are copied out of what was gathered, on streams of their own

    @property
    def hands_over(self) -> bool:
        """Whether a graph launches what the first unit of the next one gathers."""
        return parse(self.options).chosen_prefetch not in (0, "off")


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What a run costs one rank."""

    seconds: float  # of a step
    compute: float  # seconds of forward and backward without waits
    exposed: Mapping[str, float]  # seconds that compute stands at waits, by what it waits for
    optimizer: float  # seconds of the optimizer and of clipping
    steps: tuple[OptimizerCost, ...]  # what the step of each optimizer costs
    tokens: int  # of a step
    flops: float  # of the model in a step, without what is computed again
    mfu: float  # share of the data sheet's FLOP/s that `flops` are
    memory: Mapping[str, int]  # category -> bytes at the worst moment of a step
    gathered: int  # the most bytes of it that the results of all_gathers take at once
    reserved: int  # bytes that torch's caching allocator takes for that, if the device has as many
    capacity: float  # bytes of the device
    record: StepRecord = field(repr=False)  # what each stream does when, and what is held then

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return self.tokens / self.seconds

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors at the worst moment."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.peak_bytes <= self.capacity

    @property
    def limit(self) -> str:
        """What takes most: of the memory if it does not fit, of the step else."""
        times = {"compute": self.compute, "optimizer": self.optimizer, **self.exposed}
        parts: Mapping[str, float] = times if self.fits else self.memory
        return max(parts, key=lambda name: parts[name])


def cost_of(
    model: OutlinedModel,
    hardware: HardwareSpec,
    schedule: PlannedSchedule,
    *,
    tokens: int,
    accumulation: int = 1,
    reduces_each: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    known: MutableMapping[int, PlannedFrame] | None = None,
    optimizer: str = "",
) -> RunCost:
    """Simulate a step of a traced model.

    Args:
        model: the traced model.
        hardware: what it runs on.
        schedule: how it was traced.
        tokens: that a rank trains on in a microbatch.
        accumulation: microbatches of a step.
        reduces_each: whether each of them reduces its gradients, or the last one for all.
        dtype: of the compute, for the share of the data sheet.
        known: number of a frame of blocks -> the frame, of an earlier simulation of the same ones; new ones are added.
        optimizer: the name of one that the model was traced with; default: the first one.
    """
    outer, called = planned_frames(model, hardware, schedule, {} if known is None else known)
    clock, steps = Clock(), ShardSteps(sharded := model.blocks or model.outer, hardware, optimizer)
    clock.run_all([outer.forward, outer.backward], microbatches=accumulation, reduces_each=reduces_each)
    trained, stepping = sharded.trained_bytes[0], steps.seconds(*sharded.trained_bytes)
    resident = sum(frame.resident_bytes for frame in called)
    memory = memory_of_step(
        outer.memory,
        {**steps.standing_bytes(sharded.device_bytes, trained, resident), "buffers": sharded.buffer_bytes},
        stepping=steps.buffer_bytes,
        gradients=trained if accumulation > 1 else 0,
        own_streams=schedule.is_fsdp2,
    )
    flops, seconds = accumulation * sum(frame.flops for frame in (outer, *called)), clock.now + stepping
    return RunCost(
        seconds=seconds,
        compute=clock.now - clock.exposed,
        exposed=clock.exposed_by,
        optimizer=stepping,
        steps=steps.costs,
        tokens=tokens * accumulation,
        flops=flops,
        mfu=flops / seconds / hardware.data_sheet(dtype),
        memory=memory.held,
        gathered=memory.gathered,
        reserved=memory.reserved,
        capacity=hardware.memory_gib * GIB,
        record=_record(clock, memory, seconds, accumulation),
    )


def _record(clock: Clock, memory: MemoryUse, seconds: float, microbatches: int) -> StepRecord:
    clock.intervals.append(Interval(stream=COMPUTE, name="optimizer", start=clock.now, end=seconds))
    return StepRecord(
        intervals=clock.intervals,
        runs=clock.runs,
        standing=memory.standing,
        changes=memory.changes,
        seconds=seconds,
        microbatches=microbatches,
    )


class ShardSteps:
    """What optimizers take for a part of the trained shards: its share of what they take for all."""

    def __init__(self, sharded: Explanation, hardware: HardwareSpec, name: str = "") -> None:
        """`name`: of those that the model was traced with; default: the first one."""
        self.costs = sharded.optimizers[name or next(iter(sharded.optimizers))]
        self.hardware, self.all = hardware, max(sum(sharded.trained_bytes), 1)
        self.state = int(sum(max(cost.state_bytes) for cost in self.costs))
        self.buffer_bytes = int(max(max(cost.buffer_bytes) for cost in self.costs))

    def standing_bytes(self, shards: int, trained: int, resident: int = 0) -> dict[str, int]:
        """Category -> bytes that are there throughout a step: of shards, of trained ones, of resident parameters."""
        return {"parameters": shards, "optimizer": self.state * trained // self.all, "unsharded": resident}

    def seconds(self, on_device: int, on_host: int) -> float:
        """Seconds of a step on bytes of trained shards, with clipping; the host's memory is as fast as its link."""
        device, host = 1 / self.hardware.memory_bandwidth, 1 / self.hardware.host_bandwidth
        moved = sum(max(cost.moved_bytes) for cost in self.costs) / self.all
        share = (on_device + on_host) / self.all
        stepping = sum(cost.seconds for cost in self.costs) * share + moved * on_host * (host - device)
        return stepping + _CLIPPED * (on_device * device + on_host * host)


@dataclass(frozen=True, kw_only=True)
class PlannedFrame:
    """The graphs of a frame on the clock and in memory."""

    forward: GraphOfStep
    backward: GraphOfStep
    memory: StepMemory
    flops: float  # of forward and backward, without what is computed again
    resident_bytes: int  # of its parameters, if they stay throughout a step
    shard_bytes: int  # of its units on one rank
    trained_bytes: int  # those that get gradients


def planned_frames(
    model: OutlinedModel, hardware: HardwareSpec, schedule: PlannedSchedule, known: MutableMapping[int, PlannedFrame]
) -> tuple[PlannedFrame, list[PlannedFrame]]:
    """The frame of what is around the blocks, and that of each block that it calls."""
    for number in set(model.order) - known.keys():
        assert model.blocks is not None
        frame = model.blocks.frames[number]
        known[number] = _planned(frame, hardware, schedule, schedule.fuses, resident=number in model.resident)
    (outer,), called = model.outer.frames, [known[number] for number in model.order]
    around = _planned(outer, hardware, schedule, schedule.fuses and not called, called, model.names)
    return around, called


def _flops(forward: Timeline, backward: Timeline, *, trains_all: bool) -> float:
    """Three times those of forward; fewer where backward leaves out the gradients of frozen parameters."""
    names = {node.name for node in forward.compute}  # backward calls by the same names what it computes again
    there = sum(forward.work_of(node)[0] for node in forward.compute)
    back = sum(backward.work_of(node)[0] for node in backward.compute if node.name not in names)
    return there + (2 * there if trains_all else min(2 * there, back))


def _graphs_of(frame: FrameExplanation) -> tuple[fx.Graph, fx.Graph]:
    """Forward and backward; that of a frame where nothing gets a gradient is empty."""
    if "backward" in frame.scheduled:
        return frame.running("forward").graph, frame.running("backward").graph
    empty = fx.Graph()
    empty.output(())
    return frame.running("inference").graph, empty


def _planned(
    frame: FrameExplanation,
    hardware: HardwareSpec,
    schedule: PlannedSchedule,
    fuses: bool,
    called: Sequence[PlannedFrame] = (),
    names: Sequence[str] = (),
    resident: bool = False,
) -> PlannedFrame:
    graphs = _graphs_of(frame)
    numbers = {n: i for n in graphs[0].nodes if (i := number_of(n)) is not None}, backward_numbers(graphs[1])
    there, back = ({node: called[i] for node, i in each.items()} for each in numbers)
    called_as = {node: names[i] for each in numbers for node, i in each.items()}
    given: dict[str, Any] = {"copies_out": schedule.is_fsdp2, "names": called_as, "resident": resident}
    given |= {"in_subgroups": frame.plan.in_subgroups, "hands_over": schedule.hands_over}
    given["reduces_at_once"] = schedule.is_fsdp2 and describes(hardware, "cpu")
    sizes, sizes_back = (sizes_of(g, frame.plan, donated=g is graphs[1]) for g in graphs)
    timeline, timeline_back = (Timeline(each, hardware, fuses=fuses) for each in (sizes, sizes_back))
    ahead = {node: inner.forward for node, inner in there.items()}
    behind = {node: inner.backward for node, inner in back.items()}
    units = [unit for key, unit in frame.plan.units.items() if key not in frame.plan.in_subgroups]
    forward = GraphOfStep(graphs[0], timeline, ahead, stage="forward", **given)
    backward = GraphOfStep(graphs[1], timeline_back, behind, stage="backward", **given)
    keeps = schedule.is_fsdp2 and not any(unit.regathers for unit in units)
    return PlannedFrame(
        forward=forward,
        backward=backward,
        memory=StepMemory(
            forward=forward_memory(
                sizes, forward, graphs[1], fuses=fuses, holds=schedule.is_fsdp2 or bool(called), keeps=keeps
            ),
            backward=GraphMemory(sizes_back, backward, is_backward=True, fuses=fuses, holds=schedule.is_fsdp2),
            forward_calls={node: inner.memory for node, inner in there.items()},
            backward_calls={node: inner.memory for node, inner in back.items()},
        ),
        flops=_flops(timeline, timeline_back, trains_all=all(shard.trainable for u in units for shard in u.shards)),
        resident_bytes=sum(unit.unsharded_bytes for unit in units) if resident else 0,
        shard_bytes=sum(unit.shard_bytes for unit in units),
        trained_bytes=sum(unit.trained_bytes for unit in units),
    )
