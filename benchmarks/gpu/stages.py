"""The run: first without, then with activation checkpointing; see [Note: turns on one GPU]."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.gpu.result import GpuReport, Key
from benchmarks.gpu.settings import INSTANT, MAIN, Case, Link, Model, links
from benchmarks.gpu.talk import (
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
from benchmarks.gpu.turns import Budget, Member
from fxshard.tools.bench.comparison import rotated
from fxshard.tools.bench.config import FXSHARD
from fxshard.tools.bench.result import Steps, SystemResult
from fxshard.tools.bench.worker import Ready, Timed

_STEPS, _WARM_UP, _HOST_STEPS, _CONSOLIDATIONS = 3, 2, 5, 2
_LATE_S: Final = 12.0  # after the end, in which an answer is still waited for
_SEVERAL_STEPS: Final = 2  # of several microbatches
_FIRST: Final = 3  # links that come before everything else: the instant one, and those for which there are targets
_ROUNDS: Final = {100.0: 2, 50.0: 2}  # of the speeds for which there are targets; one elsewhere
_TURN_COST_S: Final = 1.0  # of a turn besides its steps, until one has been measured
_VARIANTS: Final = 0.7  # compiling backward twice more takes this part of compiling everything
_PROFILE_S: Final = 15.0  # what reading a trace may take
_STATE_BYTES_PER_S: Final = 1.5e9  # what new memory and copies from the device may allow

PROFILED: Final = ("fxshard_auto_100", "fsdp2")
CONSOLIDATED: Final = ("fxshard", "fsdp2")
HOST: Final = ("fsdp2", "fsdp2_compiled", "overlapped_100", "fxshard", "fxshard_auto_100")


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How a budget is divided."""

    # of what is left when a part begins (of everything, if another part follows): how long its systems have to be
    # ready, before they have failed
    ready: float = 0.50
    first: float = 0.52  # when the part without checkpointing ends, if all were ready early
    least: float = 0.25  # what that part may take once its systems are ready, even if that is all there is
    narrow: float = 0.08  # how long before the end of that part no link with fewer CTAs is begun
    compiling: float = 0.8  # what compiling once more may take of the time that it took the first time
    end: float = 0.97  # when everything ends


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run does."""

    model: Model  # that is trained
    device: str  # "cuda" or "cpu"
    cases: Sequence[Case]  # the systems
    world_size: int  # ranks that there seem to be
    microbatches: int  # of the steps that accumulate gradients
    folder: Path  # for everything
    num_threads: int  # of each process
    # whether systems run without activation checkpointing, with it, or first without and then with
    checkpointing: tuple[bool, ...] = (False, True)
    shares: Shares = field(default_factory=Shares)  # of the budget, what is planned with


def run(plan: Plan, report: GpuReport, budget: Budget, save: Callable[[], None]) -> None:
    """Measure as much as the budget allows; `save` is called whenever there is something new."""
    shares, end = plan.shares, budget.at(plan.shares.end)
    ready_s = 0.0
    for checkpointing in plan.checkpointing:
        is_last = checkpointing == plan.checkpointing[-1]
        with _stopped(Stage(plan, report, checkpointing, end, budget, save)) as stage:
            if not stage.fits("everything", shares.compiling * ready_s):
                return
            left_s = end - time.time() if is_last else budget.seconds
            stage.start(min(end, time.time() + shares.ready * left_s))
            ready_s = budget.spent()
            if not is_last:
                stage.end = min(end, max(budget.at(shares.first), budget.at(shares.least) + ready_s))
            stage.measure_all(narrow_end=stage.end - (0.0 if is_last else shares.narrow * budget.seconds))


@contextmanager
def _stopped(stage: Stage) -> Iterator[Stage]:
    """Whatever happens, end its processes and write down what there is."""
    try:
        yield stage
    finally:
        stage.stop(stage.members)
        stage.save()


class Stage:
    """The systems with or without activation checkpointing."""

    def __init__(
        self,
        plan: Plan,
        report: GpuReport,
        checkpointing: bool,
        end: float,
        budget: Budget,
        save: Callable[[], None],
    ) -> None:
        self.plan, self.report, self.checkpointing = plan, report, checkpointing
        self.budget, self.save = budget, save
        self.end = self.limit = end
        self.members: list[Member] = []
        self.over_s: list[float] = []

    @property
    def cost_s(self) -> float:
        """Of a turn besides its steps."""
        return max(0.0, statistics.median(self.over_s)) if self.over_s else _TURN_COST_S

    def start(self, ready_by: float) -> None:
        """Start all systems at once, and wait until each is ready or has failed."""
        for case in self.plan.cases:
            if case.checkpointing or not self.checkpointing:
                self.members.append(self._member(case))
        for member in self.members:
            member.start(WarmUp())
        self._wait_until_ready(self.members, ready_by)
        self.say(f"{sum(member.is_alive for member in self.members)} of {len(self.members)} systems are ready")

    def _member(self, case: Case) -> Member:
        job = Job(
            entry=case.entry,
            model=self.plan.model,
            device=self.plan.device,
            checkpointing=self.checkpointing,
            world_size=self.plan.world_size,
            folder=self.plan.folder,
        )
        result = SystemResult(entry=case.entry, checkpointing=self.checkpointing)
        self.report.systems.append(result)
        return Member(case, job, result, num_threads=self.plan.num_threads, end=self.limit + _LATE_S)

    def _wait_until_ready(self, members: Sequence[Member], deadline: float) -> None:
        for member in [member for member in members if member.is_alive]:
            answer = member.answer(deadline)
            if isinstance(answer, Ready) and not member.run.ready_s:
                member.run.prepared([answer])
                self.report.num_params, self.report.num_units = answer.num_params, answer.num_units
            self.save()

    def measure_all(self, narrow_end: float) -> None:
        """What matters most first; links with fewer CTAs only until `narrow_end`."""
        widest = max(link.ctas for link in links())
        wide = [link for link in links() if link.ctas == widest]
        for link in [*wide[:_FIRST], INSTANT]:  # twice, as everything is compared with it and clocks drift
            self.measure(link)
        if self.checkpointing:
            self.accumulate()
        else:
            self.host_time()
            self.consolidate()
        for link in wide[_FIRST:]:
            self.measure(link)
        if not self.checkpointing:
            self.profiles()  # late: what a profiler leaves behind in a process may cost time
        self.end = min(self.end, narrow_end)
        for link in [link for link in links() if link.ctas != widest]:
            self.measure(link)

    def measure(self, link: Link, microbatches: int = 1) -> None:
        """Let all systems that are measured on a link take turns."""
        members = [m for m in self.members if m.is_alive and m.case.runs_on(link)]
        members = [m for m in members if microbatches == 1 or m.case.accumulates]
        rounds = _ROUNDS.get(link.gigabytes_per_s, 1) if microbatches == 1 else 1
        steps, warm_up = (_STEPS, _WARM_UP) if microbatches == 1 else (_SEVERAL_STEPS, _WARM_UP)
        if link == INSTANT and microbatches == 1:
            warm_up += 1  # the first turn of all
        command = Turn(link=link, steps=steps, microbatches=microbatches, warm_up=warm_up)
        each = {m: self.cost_s + m.expected_s(link, microbatches * (steps + warm_up)) for m in members}
        what = link.name if microbatches == 1 else f"{microbatches} microbatches, {link.name}"
        if not members or not self.fits(what, rounds * sum(each.values())):
            return
        for number in range(rounds):
            for member in rotated([member for member in members if member.is_alive], number):
                self._turn(member, command, each[member])
        self.save()
        self.say(what)

    def _turn(self, member: Member, command: Turn, expected_s: float) -> None:
        start = time.time()
        answer = member.ask(command, expected_s)
        if not isinstance(answer, Timed):
            return
        if command.link == INSTANT and command.microbatches == 1:
            member.step_s, member.traffic = sum(answer.seconds) / len(answer.seconds), answer.traffic
            self.over_s.append(time.time() - start - member.step_s * (command.steps + command.warm_up))
        key = Key(
            system=member.case.name,
            checkpointing=self.checkpointing,
            link=command.link,
            microbatches=command.microbatches,
        )
        self.report.steps.setdefault(key, Steps()).add(answer)

    def host_time(self) -> None:
        """What Python takes for a step."""
        members = self._named(HOST)
        if self.fits("host time", sum(self.cost_s + 2 * _HOST_STEPS * m.step_s for m in members)):
            for member in members:
                answer = member.ask(Host(steps=_HOST_STEPS), self.cost_s + 2 * _HOST_STEPS * member.step_s)
                if isinstance(answer, Timed):
                    member.run.host_s = answer.seconds
            self.save()
            self.say("host time")

    def profiles(self) -> None:
        """A trace of each of some systems."""
        for member in self._named(PROFILED):
            if self.fits(f"profile of {member.case.name}", _PROFILE_S):
                answer = member.ask(Profile(link=MAIN), _PROFILE_S)
                if isinstance(answer, Profiled):
                    self.report.profiles[member.case.name] = answer.summary
                self._note_refusal("profile", member, answer)

    def consolidate(self) -> None:
        """The whole optimizer state on the CPU."""
        for member in self._named(CONSOLIDATED):
            expected_s = _CONSOLIDATIONS * 8 * self.report.num_params / _STATE_BYTES_PER_S
            if self.fits(f"optimizer state of {member.case.name}", expected_s):
                answer = member.ask(Consolidate(repeats=_CONSOLIDATIONS), expected_s)
                if isinstance(answer, Consolidated):
                    name = "full_optim_state_dict" if member.case.entry.system == FXSHARD else "torch_full"
                    self.report.consolidation[name] = {"seconds": answer.seconds, "bytes": answer.bytes}
                self._note_refusal("optimizer state", member, answer)

    def accumulate(self) -> None:
        """Steps of several microbatches. From then on fxshard holds its accumulators, which other peaks would count."""
        several = self.plan.microbatches
        members = [member for member in self.members if member.is_alive and member.case.accumulates]
        compiling = [member for member in members if member.case.entry.system == FXSHARD]
        compile_s = max((_VARIANTS * sum(member.run.ready_s) for member in compiling), default=0.0)
        steps_s = sum(member.expected_s(MAIN, several * (_SEVERAL_STEPS + _WARM_UP)) for member in members)
        if several < 2 or not members or not self.fits(f"{several} microbatches", compile_s + steps_s):
            return
        for member in compiling:
            member.send(WarmUp(microbatches=several, alone=False))
        self._wait_until_ready(compiling, self.end)
        self.measure(MAIN, several)

    def _named(self, names: Sequence[str]) -> list[Member]:
        return [member for name in names for member in self.members if member.is_alive and member.case.name == name]

    def _note_refusal(self, what: str, member: Member, answer: object) -> None:
        if isinstance(answer, Refused):
            self.report.left_out.append(f"{what} of {member.case.name}: {answer.error}")
        self.save()
        self.say(f"{what} of {member.case.name}")

    def fits(self, what: str, seconds: float) -> bool:
        """Whether there is time for it; if not, that is written down."""
        if time.time() + seconds <= self.end:
            return True
        self.leave_out(what)
        return False

    def leave_out(self, what: str) -> None:
        """Write down that there was no time for something."""
        with_or_without = "with" if self.checkpointing else "without"
        self.report.left_out.append(f"{what}, {with_or_without} activation checkpointing: no time")

    def say(self, what: str) -> None:
        """Tell whoever watches."""
        which = "with checkpointing" if self.checkpointing else "without checkpointing"
        print(f"[{self.budget.spent():6.1f} s] {which}: {what}", flush=True)

    def stop(self, members: Sequence[Member]) -> None:
        """End processes."""
        for member in members:
            member.send(End())  # so that they end side by side
        for member in members:
            member.stop()
