"""The history of a captured graph: snapshots of it after every pass, kept for inspection."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import fx
from torch.fx.node import map_aggregate

from fxshard.ir import text
from fxshard.ir.properties import GraphKind

CAPTURED = "captured"
"""Name of the pass result of a graph as its stage received it, before the first pass."""


_KEPT_META = (
    "val",
    "example_value",
    "fxshard",
    "recompute",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "desc",
)

_OF_INPUT, _STATIC = "tensor_dict", "_dynamo_static_input_type"
"""What Dynamo keeps of an input's attributes, and of that, whether it is a parameter: the rest may hold a model."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """Stands in a node's arguments for the node with this number."""

    index: int


class Snapshot:
    """The nodes of `graph` as they are now, with their names; tags and fake values are shared, edits are not.

    Most graphs of a history are never looked at, and making one takes as long as a pass. So a snapshot keeps what nodes
    are made of, and none of the nodes: they would keep the graph alive, and the module that owns it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        references: dict[fx.Node, Any] = {node: _Reference(i) for i, node in enumerate(graph.nodes)}
        self._nodes: list[tuple[Any, ...]] = [
            (
                node.op,
                node.target,
                *fx.map_arg((node.args, node.kwargs), references.__getitem__),
                node.name,
                node.type,
                _kept_meta(node),
            )
            for node in references
        ]
        # The module is kept only for the subgraphs in it: a history that outlives the model must not hold its modules.
        self._module = graph.owning_module if graph.find_nodes(op="get_attr") else None

    @functools.cached_property
    def graph(self) -> fx.Graph:
        """The graph; the same object each time, to be read, not edited."""
        return self.copy()

    def copy(self) -> fx.Graph:
        """Return a graph that is the caller's to edit."""
        graph, made = fx.Graph(owning_module=self._module), list[fx.Node]()

        def node_of(argument: Any) -> Any:
            return made[argument.index] if isinstance(argument, _Reference) else argument

        for op, target, args, kwargs, name, type_expr, meta in self._nodes:
            args, kwargs = map_aggregate((args, kwargs), node_of)
            node = graph.create_node(op, target, args, kwargs, name=name, type_expr=type_expr)
            node.meta = dict(meta)
            made.append(node)
        return graph


def _kept_meta(node: fx.Node) -> dict[str, Any]:
    kept = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    if static := node.meta.get(_OF_INPUT, {}).get(_STATIC):
        kept[_OF_INPUT] = {_STATIC: static}
    return kept


@dataclass(frozen=True)
class Stage:
    """One round of passes over one graph; its text is what users call it, such as `backward_accumulate_last_2`."""

    kind: GraphKind
    variant: str = ""  # name of the graph's variant, empty for the plain one
    phase: Literal["", "last", "codegen"] = ""  # which round: empty for the first
    number: int = 1  # graphs of a kind may be compiled several times

    @property
    def name(self) -> str:
        """The text without the number."""
        return "_".join(filter(None, (self.kind, self.variant, self.phase)))

    @property
    def runs(self) -> bool:
        """Whether the graph is one that runs, in its first round."""
        return self.kind not in ("dynamo", "joint") and not self.phase

    def __str__(self) -> str:
        return self.name if self.number == 1 else f"{self.name}_{self.number}"

    def free_in(self, taken: Container[str]) -> Stage:
        """Return the stage, with the first number with which its text is not taken."""
        return self if str(self) not in taken else replace(self, number=self.number + 1).free_in(taken)


@dataclass(frozen=True, kw_only=True)
class Remark:
    """What a pass says of a node: why it made it as it is, or why it left it alone."""

    node: str  # its name
    why: str  # one sentence


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """One graph after one pass."""

    name: str  # of the pass's module; `captured` for the graph before the first pass
    stage: Stage  # where the pass ran, see docs/architecture.md
    description: str  # the pass with its options
    # the graph, as it was then; the same object as in the pass result before if the pass changed nothing.
    kept: Snapshot
    changed: bool
    seconds: float  # time that the pass took, with its verification
    declined: tuple[Remark, ...] = ()  # what the pass left alone
    notes: tuple[Remark, ...] = ()  # why the pass did what it did

    @property
    def graph(self) -> fx.Graph:
        """The graph, a copy; to be read, not edited."""
        return self.kept.graph

    def __str__(self) -> str:
        """Return the graph as `ir/text.py` prints it."""
        return text.graph_text(self.graph)

    def reasons(self) -> list[str]:
        """Return what the pass said about nodes that it made or left alone, line by line."""
        made = [f"%{note.node}: {note.why}" for note in self.notes]
        return [*made, *(f"left %{declined.node} alone: {declined.why}" for declined in self.declined)]


@dataclass(eq=False)
class PassHistory:
    """The pass results of one frame: text of a stage -> name -> result, in order; and its regions."""

    stages: dict[str, dict[str, PassResult]] = field(default_factory=dict)
    regions: list[object] = field(default_factory=list)

    def begin(self, stage: Stage, kept: Snapshot, description: str) -> Stage:
        """Begin a stage with the graph that it received; return it, with another number if it is taken."""
        stage = stage.free_in(self.stages)
        first = PassResult(name=CAPTURED, stage=stage, description=description, kept=kept, changed=True, seconds=0)
        self.stages[str(stage)] = {CAPTURED: first}
        return stage

    def add(self, result: PassResult) -> None:
        """Keep what a pass made of its stage's graph, numbered if the name is taken."""
        records = self.stages[str(result.stage)]
        numbered = (f"{result.name}_{number}" for number in itertools.count(2))
        name = next(name for name in itertools.chain([result.name], numbered) if name not in records)
        records[name] = replace(result, name=name)

    def last(self, stage: Stage | str | None = None) -> PassResult:
        """Return the newest pass result of a stage; by default of the newest stage."""
        records = next(reversed(self.stages.values())) if stage is None else self.stages[str(stage)]
        return next(reversed(records.values()))

    def __iter__(self) -> Iterator[PassResult]:
        """Iterate over all pass results, stage by stage."""
        for records in self.stages.values():
            yield from records.values()


class LazyHistory(PassHistory):
    """The history of a frame whose code came from a cache; its graphs are made when somebody looks."""

    def __init__(self, make: Callable[[], dict[str, dict[str, PassResult]]]) -> None:
        self._make = make

    @functools.cached_property
    def stages(self) -> dict[str, dict[str, PassResult]]:  # type: ignore[override]
        """As in a `PassHistory`."""
        made = self._make()
        del self._make  # it knows the compiled code
        return made


def with_variant(history: PassHistory, other: PassHistory, kind: str) -> dict[str, dict[str, PassResult]]:
    """Return the stages of `history`, and those of `other` for one kind of graph under names that are not taken."""
    stages = dict(history.stages)
    for records in other.stages.values():
        if records[CAPTURED].stage.kind == kind:
            stage = records[CAPTURED].stage.free_in(stages)
            stages[str(stage)] = {key: replace(record, stage=stage) for key, record in records.items()}
    return stages
