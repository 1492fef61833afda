"""Run all systems in turn, and collect what they tell.

[Note: interleaving]
Times drift with the temperature and with other work on the machine. So in every round each system takes one step, in an
order that rotates. Each system lives in processes of its own, which sleep while it is not their turn: in one process
its guards, caches and garbage would slow down the others, the first to compile would warm up the compiler for all, and
one that dies would end all. The price is memory: all systems hold their model at once. A step behind those of other
systems finds the caches of the processor full of theirs; with `warm` each is taken behind one of its own, as in a loop.

Under torchrun every process runs this loop, and has one rank of each system: [Note: peers] in
`tools/launch/torchrun.py`.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

from fxshard.inspect.target import function_of
from fxshard.tools.bench import machine
from fxshard.tools.bench.comparison import rotated
from fxshard.tools.bench.config import REFERENCE, BenchConfig, BenchJob
from fxshard.tools.bench.result import Report, SystemResult
from fxshard.tools.bench.show import BenchConsole
from fxshard.tools.bench.task import RETURN
from fxshard.tools.bench.worker import END, TURN, Ready, Timed, rank_main
from fxshard.tools.launch.ranks import RankError, RankProcesses
from fxshard.tools.launch.torchrun import Peers


class Session:
    """The ranks of one system, as all peers see them; the code that makes it stops it."""

    def __init__(self, job: BenchJob, peers: Peers) -> None:
        self.job = job
        self._peers = peers
        self._ranks = RankProcesses(
            job,
            rank_main,
            out=job.out,
            num_threads=job.config.num_threads,
            ranks=job.config.ranks,
            stall_s=job.config.stall_s,
            place=peers.next_place(),
        )

    def start(self) -> list[Ready]:
        """Start all ranks and wait until they are ready; `RankError` if one of them failed."""
        self._ranks.start()
        return [event for event in self._from_all() if isinstance(event, Ready)]

    def step(self) -> Timed:
        """Let all ranks take a step; return what the slowest tells. `RankError` if one of them failed."""
        self._ranks.send(TURN)
        return max((event for event in self._from_all() if isinstance(event, Timed)), key=lambda timed: timed.seconds)

    def end(self) -> None:
        """Let the ranks end by themselves."""
        self._ranks.send(END)

    def stop(self) -> None:
        """End all ranks that this process has started."""
        self._ranks.stop()

    def _from_all(self) -> list[Ready | Timed]:
        """One event of each rank: none tells anything twice before it is told to go on."""
        return self._peers.collect(self._ranks.listen, self._ranks.num_here)


def run_bench(config: BenchConfig, show: BenchConsole, peers: Peers | None = None) -> Report:
    """Measure all systems; `config` is the same on all peers, by default this process alone."""
    peers = peers or Peers()
    peers.require(lambda: function_of(config.target, RETURN))
    report = Report(
        options=_options(config),
        machine=machine.facts() if peers.rank == 0 else {},  # which is the one that shows it
        systems=[SystemResult(entry=entry) for entry in config.entries],
    )
    show.begin(report)
    _run_reference(config, report, show, peers)
    for process in range(config.processes):
        _run_process(config, report, process, show, peers)
    return report


def _run_reference(config: BenchConfig, report: Report, show: BenchConsole, peers: Peers) -> None:
    show.starting(REFERENCE, 0, 0)
    session = Session(BenchJob(config=config, entry=report.reference.entry), peers)
    try:
        ready = session.start()
        session.end()
    finally:
        session.stop()
    report.num_params, report.num_units, report.eps = ready[0].num_params, ready[0].num_units, ready[0].eps
    report.reference.prepared(ready)


def _run_process(config: BenchConfig, report: Report, process: int, show: BenchConsole, peers: Peers) -> None:
    """Start every system that has not failed yet, and time its steps in rounds; see [Note: interleaving]."""
    with ExitStack() as stack:
        running: dict[str, tuple[SystemResult, Session]] = {}
        for index, result in enumerate(report.systems):
            if result.error is not None:
                continue
            show.starting(result.name, index, process)
            session = Session(BenchJob(config=config, entry=result.entry, process=process), peers)
            stack.callback(session.stop)
            try:
                result.prepared(session.start())
            except RankError as error:
                _fail(result, session, error, show)
                continue
            show.ready(result)
            running[result.name] = result, session
        for number in range(-1, config.rounds):  # round -1 warms up
            show.round(number, process)
            for name in rotated(list(running), number + process):
                result, session = running[name]
                try:
                    timed = session.step()
                except RankError as error:
                    _fail(result, session, error, show)
                    del running[name]
                    continue
                if number >= 0:
                    result.processes[process].add(timed)
        for _, session in running.values():
            session.end()


def _fail(result: SystemResult, session: Session, error: RankError, show: BenchConsole) -> None:
    session.stop()
    result.error, result.log = str(error).splitlines()[0], str(session.job.out)
    show.failed(result)


def _options(config: BenchConfig) -> dict[str, object]:
    given = dataclasses.asdict(config)
    del given["entries"], given["out"]
    given["gigabytes_per_s"] = str(config.gigabytes_per_s)  # JSON has no infinity
    return given
