"""What is kept of a compilation to look at: every graph after every pass, and what each of them costs."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fxshard.cost.optimizer_step import OptimizerCost
from fxshard.cost.stats import CollectiveCost, GraphStats, collectives_of, graph_stats
from fxshard.cost.step import StepTime
from fxshard.errors import ConfigError, nearest
from fxshard.hardware import HardwareSpec
from fxshard.inspect import schedules as scheduling
from fxshard.inspect.captured import kernels, remark
from fxshard.inspect.schedules import Schedule
from fxshard.ir import launch_groups
from fxshard.ir.collectives import ALL_REDUCES, GATHERS, REDUCTIONS, is_launch
from fxshard.ir.history import CAPTURED, PassHistory, PassResult, Remark, Stage
from fxshard.ir.meshes import MeshAxis
from fxshard.ir.ops import BETWEEN_HOST_AND_DEVICE
from fxshard.ir.plan import FramePlan
from fxshard.sharding.blocks import AutoChoice

DYNAMO = "dynamo"
"""The stage of the graph as Dynamo captured it: the user's own calls, of which no cost is known."""


class StageStats(Mapping[str, GraphStats]):
    """Name of a pass -> statistics of the graph after it, for one stage; computed when they are read."""

    def __init__(self, frame: FrameExplanation, stage: str) -> None:
        self._frame, self._stage = frame, stage

    def __getitem__(self, name: str) -> GraphStats:
        return self._frame.stats_of(self._frame.graphs[self._stage][name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame.graphs[self._stage])

    def __len__(self) -> int:
        return len(self._frame.graphs[self._stage])

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {stats}" for name, stats in self.items())


@dataclass(frozen=True, kw_only=True, eq=False)
class FrameExplanation:
    """One captured graph; a model without graph breaks is captured in one.

    Attributes:
        plan: its units.
        history: its records.
        hardware: what the costs are estimates for.
        unsharded_budget_bytes: what unsharded parameters may take at any time, `None` for no limit.
        calls: the units of each call, by FQN: blocks that are alike share a frame.
    """

    plan: FramePlan
    history: PassHistory = field(repr=False)
    hardware: HardwareSpec = field(repr=False)
    unsharded_budget_bytes: int | None = None
    calls: tuple[tuple[str, ...], ...] = ()
    _known: dict[tuple[int, bool], GraphStats] = field(default_factory=dict, repr=False)
    _schedules: dict[int, tuple[Schedule, ...]] = field(default_factory=dict, repr=False)

    @property
    def graphs(self) -> Mapping[str, Mapping[str, PassResult]]:
        """Stage -> name of a pass -> the graph after that pass, in the order in which they ran.

        Stages are `dynamo` (as captured), `joint` (forward and backward in one), `forward`, `backward`, `inference`,
        `forward_last` and so on where passes run after Inductor's own, and `forward_codegen` and so on, whose last
        graphs become code; a number follows where a graph of the kind was compiled before. The first record of a stage
        is `captured`: the graph as the stage received it.
        """
        return MappingProxyType(self.history.stages)

    @property
    def stats(self) -> Mapping[str, StageStats]:
        """Stage -> name of a pass -> statistics of the graph after it; without the stage `dynamo`."""
        return {stage: StageStats(self, stage) for stage in self.graphs if stage != DYNAMO}

    def stats_of(self, record: PassResult) -> GraphStats:
        """Statistics of one record of this frame, other than `dynamo`'s; a graph is looked at once."""
        donated = record.stage.kind == "backward"
        key = id(record.graph), donated
        if key not in self._known:
            self._known[key] = graph_stats(record.graph, self.plan, self.hardware, donated=donated)
        return self._known[key]

    def collectives(self, stage: str, pass_name: str | None = None) -> list[CollectiveCost]:
        """The launches of the graph after a pass (default: the last one), with their costs, in program order."""
        record = self.history.last(stage) if pass_name is None else self.graphs[stage][pass_name]
        return collectives_of(record.graph, self.plan, self.hardware)

    @property
    def scheduled(self) -> list[str]:
        """The stages whose graphs run: "forward", "backward" and "inference", with their numbers."""
        stages = {name: records[CAPTURED].stage for name, records in self.graphs.items()}
        return [name for name, stage in stages.items() if stage.runs and not stage.variant]

    def running(self, stage: str) -> PassResult:
        """What runs of one of `scheduled`: its last graph, or that of `forward_last` for "forward" and so on."""
        if stage not in self.scheduled:
            raise ConfigError(_unknown("graph that runs in stage", stage, self.scheduled))
        last = str(replace(self.graphs[stage][CAPTURED].stage, phase="last"))
        return self.history.last(last if last in self.graphs else stage)

    def final_stages(self) -> list[str]:
        """The stages of `running`: no `joint`, and no `forward` where there is a `forward_last`."""
        return [str(self.running(stage).stage) for stage in self.scheduled]

    def schedules(self, stage: str) -> tuple[Schedule, ...]:
        """What the compiled schedule of a stage costs, and what others would: none, one unit ahead, automatic."""
        key = id(self.running(stage).graph)
        if key not in self._schedules:
            self._schedules[key] = scheduling.schedules(self, stage)
        return self._schedules[key]

    def lower_bound(self, stage: str) -> float:
        """Seconds that no schedule of the same launches and compute can beat, by the cost model."""
        return scheduling.lower_bound(self, stage)

    def why(self, stage: str) -> dict[str, tuple[str, ...]]:
        """Why each launch and copy of a stage is as it is, and where it is: what the passes said, newest last.

        Args:
            stage: one of `scheduled`.

        Returns:
            Name of the launch in the graph that runs -> lines "pass: reason", for all of them in program order.

        Raises:
            ConfigError: there is no such stage.
        """
        final = self.running(stage)
        stages = dict.fromkeys((stage, str(final.stage)))
        records = itertools.chain.from_iterable(self.graphs[name].values() for name in stages)
        explained = (n for n in final.graph.nodes if is_launch(n) or n.target in BETWEEN_HOST_AND_DEVICE)
        said: dict[str, list[str]] = {node.name: [] for node in explained}
        for record in records:
            for name, reasons in _reasons(record).items():
                said.get(name, []).extend(reasons)
        return {name: tuple(dict.fromkeys(reasons)) for name, reasons in said.items()}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Explanation:
    """What every pass did to a model: returned by `fxshard.explain` and `fxshard.explanation_of`.

    Attributes:
        model: name of the model's class.
        world_size: ranks that the outermost unit is sharded over.
        replicas: ranks that hold the same shard of it.
        frames: one for each captured graph with sharded parameters, in the order of their capture.
        calls: numbers of the frames that a forward calls, in the order of the model's units.
        choice: whether "auto" compiles block by block, and why, as of the compiled call that ran last; `None` where
            the option `regional` was set.
        hardware: what the costs are estimates for.
        device: the kind that the graphs were captured for; see [Note: the device of the capture].
        device_bytes: of one rank's shards on the device; gradients and optimizer state are where their shards are.
        host_bytes: the same of those in the host's memory.
        trained_bytes: those of `device_bytes`, and of `host_bytes`, that get gradients.
        buffer_bytes: of the model's buffers, which every rank has whole.
        offloaded: names of the units that these are of.
        optimizers: name -> what the steps of optimizers cost that were given.
        uncaptured: units that no frame reads -> bytes that are gathered of them, where code that runs uncompiled does.
    """

    model: str
    world_size: int
    frames: tuple[FrameExplanation, ...]
    hardware: HardwareSpec
    device: str
    calls: tuple[int, ...] = ()
    choice: AutoChoice | None = None
    replicas: int = 1
    device_bytes: int = 0
    host_bytes: int = 0
    trained_bytes: tuple[int, int] = (0, 0)
    buffer_bytes: int = 0
    offloaded: tuple[str, ...] = ()
    uncaptured: Mapping[str, int] = field(default_factory=dict)
    optimizers: Mapping[str, tuple[OptimizerCost, ...]] = field(default_factory=dict)

    @property
    def graphs(self) -> Mapping[str, Mapping[str, PassResult]]:
        """`frames[0].graphs`; raises `ConfigError` if there are several frames."""
        return self._only_frame("graphs").graphs

    @property
    def stats(self) -> Mapping[str, StageStats]:
        """`frames[0].stats`; raises `ConfigError` if there are several frames."""
        return self._only_frame("stats").stats

    @property
    def units(self) -> tuple[str, ...]:
        """FQNs of the units that frames read, the empty one for the root, in the order of their first use."""
        return tuple(
            dict.fromkeys(
                name for f in self.frames for call in f.calls for name in call if name not in f.plan.in_subgroups
            )
        )

    @property
    def step(self) -> StepTime:
        """What all calls of the frames take in a row, forward and backward, without code that runs uncompiled."""
        return scheduling.step([self.frames[number] for number in self.calls])

    @property
    def model_axes(self) -> tuple[MeshAxis, ...]:
        """The mesh axes of DTensors in the model's own code, those of tensor parallelism among them."""
        return tuple(dict.fromkeys(axis for frame in self.frames for axis in frame.plan.model_axes))

    def print(self, pass_name: str, stage: str | None = None, frame: int | None = None) -> None:
        """Print the graphs after a pass, and why the pass made and left what it did.

        Args:
            pass_name: such as "insert_collectives"; "captured" is the graph before the first pass.
            stage: only this one; default: all that the pass ran in.
            frame: only this one; default: all.

        Raises:
            ConfigError: there is no such pass, stage or frame; the message names those that there are.
        """
        for number, record in self._records(pass_name, stage, frame):
            foreign = remark(self.device, self.hardware, [record.graph]) if kernels(record.graph) else ""
            reasons = "".join(f"# {line}\n" for line in (*record.reasons(), foreign) if line)
            when = record.description if record.name == CAPTURED else f"after {record.description}"
            print(f"# {self._where(number, record.stage)}, {when}\n{reasons}{record}\n")

    def diff(self, before: str, after: str, stage: str | None = None, frame: int | None = None) -> str:
        """What changed between two passes, as a unified diff; a stage that lacks one of them has no part in it.

        With `stage` or `frame` it is of that one alone.

        Raises:
            ConfigError: there is no such pass, stage or frame, or no stage has both.
        """
        old = {(number, record.stage): record for number, record in self._records(before, stage, frame)}
        new = {(number, record.stage): record for number, record in self._records(after, stage, frame)}
        both = [place for place in old if place in new]
        if not both:
            raise ConfigError(
                f"no stage has both {before!r} and {after!r}: {before!r} is in {_stages(old)}, {after!r} in "
                f"{_stages(new)}. A diff is of one stage."
            )
        return "".join(_unified(self._where(*place), old[place], new[place]) for place in both)

    def save_html(self, path: str | Path) -> None:
        """Write one self-contained page: the passes, their differences side by side, the collectives by unit."""
        from fxshard.inspect import html

        html.save(self, Path(path))

    def __repr__(self) -> str:
        from fxshard.inspect import tables

        return tables.text(self)

    def __rich__(self) -> Any:
        from fxshard.inspect import tables

        return tables.tables(self)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        """For notebooks: the tables, and `repr` where HTML cannot be shown."""
        from fxshard.inspect import tables

        return {"text/plain": repr(self), "text/html": tables.html_tables(self)}

    def _only_frame(self, attribute: str) -> FrameExplanation:
        if len(self.frames) != 1:
            raise ConfigError(
                f"the model was captured in {len(self.frames)} frames, and `.{attribute}` is for one. Use "
                f".frames[i].{attribute}. (TORCH_LOGS=graph_breaks says why a model is captured in several.)"
            )
        return self.frames[0]

    def _records(self, name: str, stage: str | None, frame: int | None) -> list[tuple[int, PassResult]]:
        if frame is not None and frame not in range(len(self.frames)):
            raise ConfigError(f"there is no frame {frame!r}: there are {len(self.frames)}, counted from 0.")
        places = [
            (number, place, records)
            for number in (range(len(self.frames)) if frame is None else (frame,))
            for place, records in self.frames[number].graphs.items()
        ]
        if stage is not None and all(place != stage for _, place, _ in places):
            raise ConfigError(_unknown("stage", stage, (place for _, place, _ in places)))
        places = [place for place in places if stage in (None, place[1])]
        found = [(number, records[name]) for number, _, records in places if name in records]
        if not found:
            where = "" if stage is None else f" in stage {stage!r}"
            raise ConfigError(_unknown("pass", name, (known for _, _, records in places for known in records), where))
        return found

    def _where(self, number: int, stage: Stage) -> str:
        return str(stage) if len(self.frames) == 1 else f"frame {number}, {stage}"


def _reasons(record: PassResult) -> dict[str, list[str]]:
    """Name of a launch -> what the pass said of it, or of the first of its group, which stands for the others."""
    said: dict[str, list[str]] = {}
    reasons: tuple[Remark, ...] = (*record.notes, *record.declined)
    for reason in reasons:
        said.setdefault(reason.node, []).append(f"{record.name}: {reason.why}")
    found = dict(said)
    kinds = (GATHERS, REDUCTIONS, ALL_REDUCES) if said else ()
    for group in itertools.chain.from_iterable(launch_groups.groups_of(record.graph, kind) for kind in kinds):
        first = said.get(group.launches[0].name, [])
        found |= {launch.name: said.get(launch.name, first) for launch in group.launches}
    return found


def _unified(where: str, old: PassResult, new: PassResult) -> str:
    before, after = (f"{where}, {record.name}" for record in (old, new))
    diff = difflib.unified_diff(str(old).splitlines(), str(new).splitlines(), before, after, lineterm="")
    return "".join(f"{line}\n" for line in diff)


def _stages(places: Iterable[tuple[int, Stage]]) -> str:
    return ", ".join(dict.fromkeys(str(stage) for _, stage in places))


def _unknown(kind: str, name: object, known: Iterable[str], where: str = "") -> str:
    names = list(dict.fromkeys(known))
    near = nearest(name, names)
    guess = f" Did you mean {near!r}?" if near else ""
    return f"there is no {kind} {name!r}{where}.{guess} There are: {', '.join(names) or 'none'}."
