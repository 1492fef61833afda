"""What one configuration of a run costs: its step, and what the step holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxshard.cost.sizes import sizes_of
from fxshard.cost.step import COMPUTE, Clock, GraphOfStep, Interval
from fxshard.cost.step_memory import GraphMemory, StepMemory, forward_memory, memory_of_step
from fxshard.cost.step_record import StepRecord
from fxshard.cost.symbols import Sum
from fxshard.cost.timeline import Timeline
from fxshard.hardware import HardwareSpec
from fxshard.inspect.explanation import FrameExplanation
from fxshard.ir.planned_block import number_of
from fxshard.plan.outline import OutlinedModel

GIB = 2**30
_STATE = 2  # bytes of AdamW's state for each byte of parameters
_STEPPED = 10  # of AdamW's tensors four are read and three written; to clip, gradients are read twice and written


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule:
    """How the blocks of a model run; what is around them runs uncompiled.

    Attributes:
        options: of the backend.
        fuses: whether a compiler fuses the pointwise ops of blocks; without, forward keeps what autograd keeps.
        is_fsdp2: whether parameters are copied out of what was gathered, on streams of their own.
    """

    options: Mapping[str, Any]
    fuses: bool = True
    is_fsdp2: bool = False


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What a run costs one rank.

    Attributes:
        seconds: of a step.
        compute: seconds of forward and backward without waits.
        exposed: seconds that compute stands at waits, by what it waits for.
        optimizer: seconds of the optimizer and of clipping.
        tokens: of a step.
        flops: of the model in a step, without what is computed again.
        mfu: share of the data sheet's FLOP/s that `flops` are.
        memory: category -> bytes at the worst moment of a step.
        reserved: bytes that torch's caching allocator takes for that, if the device has as many.
        capacity: bytes of the device.
        record: what each stream does when, and what is held then.
    """

    seconds: float
    compute: float
    exposed: Mapping[str, float]
    optimizer: float
    tokens: int
    flops: float
    mfu: float
    memory: Mapping[str, int]
    reserved: int
    capacity: float
    record: StepRecord = field(repr=False)

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
) -> RunCost:
    """Simulate a step of a traced model with a fused AdamW.

    Args:
        model: the traced model.
        hardware: what it runs on.
        schedule: how it was traced.
        tokens: that a rank trains on in a microbatch.
        accumulation: microbatches of a step.
        reduces_each: whether each of them reduces its gradients, or the last one for all.
        dtype: of the compute, for the share of the data sheet.
    """
    graphs, clock = _Graphs(model, hardware, schedule), Clock(hardware)
    unreduced = 0 if reduces_each else accumulation - 1
    clock.run_all(graphs.of_step * accumulation, unreduced=unreduced * len(graphs.of_step))
    shards = (model.blocks or model.outer).device_bytes
    optimizer = _STEPPED * shards / hardware.memory_bandwidth
    standing = {"parameters": shards, "optimizer": _STATE * shards}
    gradients = shards if accumulation > 1 else 0
    memory = memory_of_step(graphs.memory, standing, gradients=gradients, own_streams=schedule.is_fsdp2)
    flops, seconds = 3 * graphs.forward_flops * accumulation, clock.now + optimizer
    clock.intervals.append(Interval(stream=COMPUTE, name="optimizer", start=clock.now, end=seconds))
    return RunCost(
        seconds=seconds,
        compute=clock.now - clock.exposed,
        exposed=clock.exposed_by,
        optimizer=optimizer,
        tokens=tokens * accumulation,
        flops=flops,
        mfu=flops / seconds / hardware.data_sheet(dtype),
        memory=memory.held,
        reserved=memory.reserved,
        capacity=hardware.memory_gib * GIB,
        record=StepRecord(
            intervals=clock.intervals,
            runs=clock.runs,
            standing=memory.standing,
            changes=memory.changes,
            seconds=seconds,
            microbatches=accumulation,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _PlannedFrame:
    """The graphs of a frame on the clock and in memory."""

    forward: GraphOfStep
    backward: GraphOfStep
    memory: StepMemory
    forward_flops: float


class _Graphs:
    """The graphs of an outlined model; those of blocks that are alike are made once."""

    def __init__(self, model: OutlinedModel, hardware: HardwareSpec, schedule: PlannedSchedule) -> None:
        self.hardware, self.copies_out = hardware, schedule.is_fsdp2
        inner = [self._frame(frame, schedule.fuses) for frame in (model.blocks.frames if model.blocks else ())]
        (outer_frame,) = model.outer.frames
        called = [inner[number] for number in model.order]
        outer = self._frame(outer_frame, False, called, model.names)
        self.of_step, self.memory = [outer.forward, outer.backward], outer.memory
        self.forward_flops = sum(frame.forward_flops for frame in (outer, *called))

    def _frame(
        self, frame: FrameExplanation, fuses: bool, called: Sequence[_PlannedFrame] = (), names: Sequence[str] = ()
    ) -> _PlannedFrame:
        graphs = [frame.running(stage).graph for stage in ("forward", "backward")]
        there, back = ({n: called[i] for n in g.nodes if (i := number_of(n)) is not None} for g in graphs)
        called_as = {n: names[i] for g in graphs for n in g.nodes if (i := number_of(n)) is not None}
        given: dict[str, Any] = {"copies_out": self.copies_out, "names": called_as}
        sizes, sizes_back = (sizes_of(g, frame.plan, donated=g is graphs[1]) for g in graphs)
        timeline, timeline_back = (Timeline(each, self.hardware, fuses=fuses) for each in (sizes, sizes_back))
        ahead = {node: inner.forward for node, inner in there.items()}
        behind = {node: inner.backward for node, inner in back.items()}
        flops = Sum(cost.flops for cost in timeline.compute.values()).total
        return _PlannedFrame(
            forward=GraphOfStep(graphs[0], timeline, ahead, stage="forward", **given),
            backward=GraphOfStep(graphs[1], timeline_back, behind, stage="backward", **given),
            memory=StepMemory(
                forward=forward_memory(sizes, graphs[1], fuses=fuses),
                backward=GraphMemory(sizes_back, is_backward=True, fuses=fuses),
                forward_calls={node: inner.memory for node, inner in there.items()},
                backward_calls={node: inner.memory for node, inner in back.items()},
            ),
            forward_flops=float(sizes.point.value(flops)),
        )
