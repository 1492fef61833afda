"""What the solver chooses from: the seconds and bytes of each block under each policy.

[Note: prices of policies]
The solver looks at a step as a row of places: until each call of a block, in each, and behind the last one, forward and
backward. A block is priced alone on the simulation's clock: what its graphs take, what they still have on a queue when
they end (which the next block hides), and the gathers that they begin with (which the block before hides). Its bytes
are those of the simulation, to the byte. Its seconds leave out what reaches farther than one block.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fxshard.cost.solver import Array, Choice, PolicyProblem
from fxshard.cost.step import COMPUTE, Clock, GraphOfStep, Interval
from fxshard.cost.step_memory import FrameMemory, MemoryUse, memory_of_frame, memory_of_step
from fxshard.plan.policies import Policy, TracedPolicies
from fxshard.plan.run import PlannedFrame, ShardSteps

Seconds = Mapping[str, float]
"""What is busy -> how long."""


class _GraphPrice(NamedTuple):
    """What one graph takes, alone."""

    ahead: Seconds  # while the graph before runs: the gathers that it begins with, and what they take from compute
    inside: Seconds
    behind: Seconds  # while the graph behind it runs


def _price(graph: GraphOfStep, *, again: bool, reduces: bool) -> _GraphPrice:
    begun = {n: Interval(stream=graph.timeline.queues[n], name=n.name, start=0, end=0, node=n) for n in graph.first}
    clock = Clock(again=again, reduces=reduces, begun=begun)
    clock.run(graph, None)
    ahead, inside, behind = (collections.defaultdict[str, float](float) for _ in range(3))
    inside[COMPUTE] = clock.now
    for each in clock.intervals:
        if each.stream != COMPUTE:
            over = max(0.0, each.end - max(each.start, clock.now))
            behind[each.stream] += over
            inside[each.stream] += each.end - each.start - over
    timeline = graph.timeline
    for node in graph.first if not (again and graph.resident) else ():
        ahead[timeline.queues[node]] += timeline.seconds[node]
        ahead[COMPUTE] += timeline.seconds[node] * timeline.shares.get(node, 0.0)
    return _GraphPrice(ahead, inside, behind)


class Prices:
    """Builds the problem of a traced model; see [Note: prices of policies]."""

    def __init__(self, traced: TracedPolicies) -> None:
        self.traced = traced
        self.of_policy = [traced.frames_of(picks) for picks in traced.all_alike()]
        self.outer, self.called = self.of_policy[0]
        self.steps = ShardSteps(traced.blocks, traced.hardware)
        accumulation, each = traced.run.get("accumulation", 1), traced.run.get("reduces_each", True)
        # (an earlier microbatch has run, this one reduces) -> how many are so
        self.turns = collections.Counter((i > 0, each or i == accumulation - 1) for i in range(accumulation))
        self.accumulates = accumulation > 1
        self.use = self._memory_of_step()
        self.num_places = len(self.use.places)
        self.starts = [turn * self.num_places for turn in range(len(self.turns))]  # first moments
        graphs = [g for outer, called in self.of_policy for f in (outer, *called) for g in (f.forward, f.backward)]
        queues = sorted({queue for graph in graphs for queue in graph.timeline.queues.values()})
        self.row = {COMPUTE: 0} | {queue: 1 + i for i, queue in enumerate(queues)}
        self._memory: dict[tuple[int, int], tuple[FrameMemory, FrameMemory]] = {}

    def problem(self) -> PolicyProblem:
        """What the solver chooses from."""
        seconds = self._nothing()
        seconds[0, -1] = self.steps.seconds(self.traced.blocks.trained_bytes[0], 0)
        for start in self.starts:
            self._add_outer(seconds, start)
        times = [number for number in self.turns.values() for _ in range(self.num_places)]
        return PolicyProblem(
            units=[self._choices(i) for i in range(len(self.called))],
            seconds=seconds,
            nbytes=np.array(self.use.places, dtype=float),
            times=np.array([*times, 1], dtype=float),
        )

    def _memory_of_step(self) -> MemoryUse:
        shards, (trained, _) = self.traced.blocks.device_bytes, self.traced.blocks.trained_bytes
        return memory_of_step(
            self.outer.memory,
            {**self.steps.standing_bytes(shards, trained), "buffers": self.traced.blocks.buffer_bytes},
            stepping=self.steps.buffer_bytes,
            gradients=trained if self.accumulates else 0,
            own_streams=self.traced.schedule.is_fsdp2,
        )

    def _nothing(self) -> Array:
        """`[resources, moments]`: the places of each turn, and the optimizer's step."""
        return np.zeros((len(self.row), len(self.turns) * self.num_places + 1))

    def _add_outer(self, seconds: Array, start: int) -> None:
        """Add what runs around the blocks, at the place before each call and behind the last one."""
        calls = iter(self.use.calls)
        for graph in (self.outer.forward, self.outer.backward):
            came, call = 0.0, next(calls)
            place, left = start + call.begins - 1, len(graph.calls)
            for node in graph.events:
                if node in graph.calls:
                    before, left = graph.timeline.computed_before(node), left - 1
                    seconds[0, place] += before - came
                    place, came = start + call.ends, before
                    call = next(calls) if left else call
                elif node in graph.timeline.queues and node not in graph.first:
                    seconds[self.row[graph.timeline.queues[node]], place] += graph.timeline.seconds[node]
            seconds[0, place] += graph.timeline.compute_seconds - came

    def _choices(self, i: int) -> list[Choice]:
        last = len(self.called) - 1
        places = i, 2 * last + 1 - i  # of its forward and backward, among the calls
        late = 0 if i == last else self.called[i + 1].memory.backward.late_bytes
        base = np.array(self._memory_of(self.called[i], late), dtype=float)  # [forward or backward, `FrameMemory`]
        found = []
        for policy, (_, called) in zip(self.traced.policies, self.of_policy, strict=True):
            more = np.array(self._memory_of(called[i], late), dtype=float) - base
            seconds = self._seconds(called[i], places, policy)
            nbytes = self._added_bytes(called[i], places, policy, more)
            found.append(Choice(name=policy.name, seconds=seconds, nbytes=nbytes))
        return found

    def _seconds(self, frame: PlannedFrame, places: tuple[int, int], policy: Policy) -> Array:
        found = self._nothing()
        for start, (again, reduces) in zip(self.starts, self.turns, strict=True):
            for graph, at in zip((frame.forward, frame.backward), places, strict=True):
                price = _price(graph, again=again, reduces=reduces)
                where = (self._beside(at, -1), self.use.calls[at].begins, self._beside(at, 1))
                for of, there in zip(price, where, strict=True):
                    for name, seconds in of.items():
                        found[self.row[name], start + there] += seconds
        if policy.offloads:
            found[0, -1] = self.steps.seconds(-frame.trained_bytes, frame.trained_bytes)
        return found

    def _beside(self, call: int, side: int) -> int:
        """The place of what runs before a call (side -1) or behind it (1): of the next block, or what is around them.

        There is a place between two blocks, too; hardly anything runs in it.
        """
        half, calls = len(self.called), self.use.calls
        if 0 <= call + side < 2 * half and (call < half) == (call + side < half):
            return calls[call + side].begins
        return calls[call].begins - 1 if side < 0 else calls[call].ends

    def _added_bytes(self, frame: PlannedFrame, places: tuple[int, int], policy: Policy, more: Array) -> Array:
        """What is held because of a policy; `more` is `FrameMemory` less that of the first one."""
        standing = frame.resident_bytes
        if policy.offloads:  # with several microbatches gradients stand, too
            standing -= sum(self.steps.standing_bytes(frame.shard_bytes, frame.trained_bytes).values())
            standing -= frame.trained_bytes * self.accumulates
        found = np.full(self.num_places, float(standing))
        for call, (ahead, begins, launches, left) in zip((self.use.calls[at] for at in places), more, strict=True):
            found[call.ahead : call.begins] += ahead
            found[call.begins :] = standing
            found[call.begins] += begins
            found[call.launches] += launches
            found[call.ends :] += left
        return found

    def _memory_of(self, frame: PlannedFrame, late: int) -> tuple[FrameMemory, FrameMemory]:
        key = id(frame), late
        if key not in self._memory:
            self._memory[key] = memory_of_frame(
                frame.memory, late, own_streams=self.traced.schedule.is_fsdp2, accumulates=self.accumulates
            )
        return self._memory[key]
