"""The correct graphs, each with its baseline, and the mutants that a mutator makes of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table

from fxshard.errors import InvariantError
from fxshard.ir import liveness, signature
from fxshard.ir.history import CAPTURED, PassHistory, Snapshot
from fxshard.ir.properties import GraphKind, Property
from fxshard.ir.verify import baseline, verifier
from fxshard.passes import pipeline
from fxshard.passes._base import GraphPass
from fxshard.passes.assign_streams import AssignStreams
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.chain_reductions import ChainReductions
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.hand_off_prefetch import HandOffPrefetch
from fxshard.passes.hoist_copies import HoistCopies
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.lower_streams import LowerStreams
from fxshard.passes.pipeline import LAST_GIVEN
from fxshard.passes.reduce_unused import ReduceUnused
from fxshard.passes.reshard_policy import ReshardPolicy
from fxshard.passes.sink_waits import SinkWaits
from tests import encoded_shards, graphs, objects
from tests.graphs import SPLIT, Traced
from tests.mutation.edits import Mutator
from tests.schedules import DEAR_COPIES


class PartlyUsed(nn.Module):
    """Reads two of its three vectors: the gradient of its shard has zeros in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = (nn.Parameter(torch.randn(graphs.WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first + self.last


def partly_used(**kwargs: Any) -> Traced:
    """One unit of which a parameter is never read."""
    return graphs.trace(PartlyUsed(), **kwargs)


def reduce_unused(unit: Any) -> None:
    """Have zeros reduced for what has no gradient."""
    unit.set_reduce_scatter_unused_params(True)


def in_step(**kwargs: Any) -> Traced:
    """The same, where other ranks may read the others."""
    return partly_used(then=reduce_unused, **{"reshard_after_forward": True, **kwargs})


class Gated(graphs.Layer):
    """A layer whose result decides how much of its input is left."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x)) * x


class TwoKinds(graphs.ResidualLayers):
    """Three layers of one kind, of which the first reads what needs no gradient, and two of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.extend([Gated(), Gated()])


def two_regions(**kwargs: Any) -> Traced:
    """Two regions, each called twice, with matrices that have the shape of the activations."""
    inputs = (torch.ones(graphs.WIDTH, graphs.WIDTH),)
    return graphs.trace(TwoKinds(), units=graphs.layers_of, inputs=inputs, pipeline=pipeline.default(), **kwargs)


def square_batch(**kwargs: Any) -> Traced:
    """Two units whose matrices have the shape of the activations."""
    inputs = (torch.ones(graphs.WIDTH, graphs.WIDTH),)
    return graphs.trace(graphs.TwoLayers(), units=graphs.layers_of, inputs=inputs, **kwargs)


def two_replicas(**kwargs: Any) -> Traced:
    """Two units, each held by two groups of ranks."""
    return graphs.two_layers(replicas=2, **kwargs)


def two_replicas_of_doubles(**kwargs: Any) -> Traced:
    """A unit whose gradients are divided before the first reduction and after the second."""
    return graphs.doubles(replicas=2, **kwargs)


MODELS: dict[str, Callable[..., Traced]] = {
    "two_layers": graphs.two_layers,
    "uneven": graphs.uneven,
    "two_dtypes": graphs.two_dtypes,
    "doubles": graphs.doubles,
    "mixed_precision": graphs.mixed_precision,
    "frozen_weight": graphs.frozen_weight,
    "read_twice": graphs.read_twice,
    "called_twice": graphs.called_twice,
    "casting": graphs.casting,
    "scalar": graphs.scalar,
    "gpt": graphs.gpt,
    "partly_used": partly_used,
    "in_step": in_step,
    "by_object": objects.by_object,
    "square_batch": square_batch,
    "two_regions": two_regions,
    "in_subgroups": graphs.in_subgroups,
    "offloaded": graphs.offloaded,
    "two_replicas": two_replicas,
    "two_replicas_of_doubles": two_replicas_of_doubles,
    "two_meshes": graphs.two_meshes,
    "encoded": encoded_shards.twofold,
}
MUTATED = tuple(model for model in MODELS if model not in ("frozen_weight", "casting", "gpt"))
WHOLE = ("in_step", "by_object")
"""Whose launches are not cut."""
ON_FOUR_RANKS = ("two_layers", "uneven", "doubles", "scalar", "in_subgroups")
REWRITTEN = ("two_layers", "uneven", "two_dtypes", "doubles", "called_twice", "offloaded", "two_replicas", "encoded")
ASIDE = ("two_layers", "two_dtypes", "mixed_precision")
REWRITES: dict[str, tuple[GraphPass, ...]] = {
    "coalesced": (CoalesceCollectives(),),
    "merged": (BucketCollectives(size=1.0),),
    "split": (BucketCollectives(size=6e-5),),  # about 64 bytes
    "merged and coalesced": (BucketCollectives(size=1.0), CoalesceCollectives()),
    "scheduled": (SinkWaits(), HoistPrefetch(depth=1), ChainReductions()),
    "aside": (SinkWaits(), HoistPrefetch(depth=1), AssignStreams(mode="side")),
    "coalesced and aside": (CoalesceCollectives(), SinkWaits(), AssignStreams(mode="side")),
    "coalesced and scheduled": (
        CoalesceCollectives(),
        SinkWaits(max_buffers=1),
        HoistPrefetch(depth=2),
        HoistCopies(),
        ChainReductions(),
    ),
}
DIALECTS = ("eager", "inductor")
WORLD_SIZES = (1, 2, 4)
KINDS: tuple[GraphKind, ...] = ("joint", *SPLIT)

COLLECTIVES = (Property.MARKED, Property.DEDUPED, Property.COLLECTIVES)
CODEGEN: tuple[GraphPass, ...] = (HandOffPrefetch(), LowerStreams())
CODEGEN_GIVEN = {"codegen": pipeline.CODEGEN_GIVEN, "codegen after Inductor": pipeline.LAST_GIVEN}
MARKERS = (Property.MARKED, Property.DEDUPED, Property.RESHARD_TAGGED)


@functools.cache
def traced(model: str, world_size: int, dialect: str) -> Traced:
    """A model, traced once for all tests."""
    return MODELS[model](world_size=world_size, lowering=dialect)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A correct graph of a model: after InsertCollectives, rewritten or not, or the joint graph with its markers.

    Attributes:
        model: key of `MODELS`.
        world_size: ranks.
        dialect: eager's or Inductor's.
        kind: of the graph.
        held: to what it is held: the baseline of its "stage", that and a "budget" that it just meets, that and its
            "types", or the order of its launches before Inductor's "last" passes; at the end of the "codegen" stage the
            baseline of that one, with what is known "after Inductor" as well.
        rewritten: key of `REWRITES`.
    """

    model: str
    world_size: int
    dialect: str
    kind: GraphKind
    held: str = "stage"
    rewritten: str = ""

    def __str__(self) -> str:
        by = f", {self.rewritten}" if self.rewritten else ""
        return f"{self.model} ({self.held}, {self.kind}, {self.world_size} ranks, {self.dialect}{by})"

    @property
    def traced(self) -> Traced:
        return traced(self.model, self.world_size, self.dialect)

    @property
    def pass_name(self) -> str:
        """The pass that made the graph."""
        return (ReshardPolicy if self.kind == "joint" else InsertCollectives)().name

    @property
    def graph(self) -> fx.Graph:
        """A copy that is the caller's to break."""
        return Snapshot(self._correct).copy()

    @functools.cached_property
    def _correct(self) -> fx.Graph:
        if self.kind == "joint" or not self.rewritten:
            return self.traced.history.stages[self.kind][self.pass_name].graph
        return self._after(*REWRITES[self.rewritten], *(CODEGEN if self.held in CODEGEN_GIVEN else ()))

    def _after(self, *passes: GraphPass) -> fx.Graph:
        """The graph with its collectives after these passes."""
        gm, ctx = self.traced.at(self.kind, after=InsertCollectives)
        captured = self.traced.history.stages[self.kind][CAPTURED].graph
        # no new node gets the name of an erased one
        gm.graph._graph_namespace._used_names.update(node.name for node in captured.nodes)
        decompositions = select_decomp_table() if self.dialect == "inductor" else {}
        ctx = dataclasses.replace(ctx, hardware=DEAR_COPIES, decompositions=decompositions)
        for step in passes:
            step.apply(gm, ctx)
        return gm.graph

    @functools.cached_property
    def baseline(self) -> baseline.Baseline:
        """As the manager takes it before the first pass."""
        stages = self.traced.history.stages
        before = stages[self.kind][self.pass_name if self.held == "last" else CAPTURED].graph
        if self.kind == "joint" and self.traced.plan.in_step:
            before = stages["joint"][ReduceUnused().name].graph  # it adds what is promised
        if self.held in CODEGEN_GIVEN:
            before = self._after(*REWRITES[self.rewritten])
        return baseline.baseline_of(
            before,
            self.traced.plan,
            self.kind,
            num_results=len(signature.results_of(stages["dynamo"][CAPTURED].graph)),
            unsharded_budget_bytes=_peak(self.graph) if self.held == "budget" else None,
        )

    def verify(self, graph: fx.Graph, *, debug: bool = False) -> None:
        """Raise as the manager would after the pass that made the graph."""
        properties: tuple[Property, ...] = MARKERS if self.kind == "joint" else COLLECTIVES
        if self.held == "last":
            properties = LAST_GIVEN
        properties = CODEGEN_GIVEN.get(self.held, properties)
        debug |= self.held == "types"
        verifier.verify(graph, self.baseline, properties, broken_by="Mutant()", debug=debug)

    def with_graph(self, graph: fx.Graph) -> Traced:
        """The model's step with this graph in the place of the correct one."""
        stages = {kind: dict(records) for kind, records in self.traced.history.stages.items()}
        record = stages[self.kind][self.pass_name]
        stages[self.kind][self.pass_name] = dataclasses.replace(record, kept=Snapshot(graph))
        return dataclasses.replace(self.traced, history=PassHistory(stages=stages))


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A correct graph, broken at one place."""

    case: Case  # the graph that it was
    mutator: str  # name of what broke it
    where: str  # name of the node at which
    graph: fx.Graph  # what became of it

    def __str__(self) -> str:
        return f"{self.mutator} at %{self.where} of {self.case}"

    def caught_by(self) -> str | None:
        """The invariant that it breaks first."""
        try:
            self.case.verify(self.graph)
        except InvariantError as error:
            return str(error).split("`")[1]
        return None

    def takes_more_memory(self) -> bool:
        """Whether more bytes of unsharded parameters live at once."""
        return _peak(self.graph) > _peak(self.case.graph)


def correct_cases(models: Sequence[str]) -> Iterator[Case]:
    """Every graph of the models: in eager's dialect for all numbers of ranks, in Inductor's for two."""
    for model, world_size, dialect, kind in itertools.product(models, WORLD_SIZES, DIALECTS, KINDS):
        if dialect == "eager" or world_size == 2:
            yield Case(model=model, world_size=world_size, dialect=dialect, kind=kind)
        rewrites = kind != "joint" and world_size == 2 and model not in WHOLE
        for rewritten in REWRITES if rewrites else ():
            yield Case(model=model, world_size=world_size, dialect=dialect, kind=kind, rewritten=rewritten)


def mutated_cases() -> Iterator[Case]:
    """Those that are broken: where there is something to gather, and four ranks where they make a difference."""
    for held, kind in itertools.product(("last", "budget", "types"), SPLIT):
        yield Case(model="gpt", world_size=2, dialect="eager", kind=kind, held=held)
    for model, kind, held in itertools.product(ASIDE, SPLIT, CODEGEN_GIVEN):
        yield Case(model=model, world_size=2, dialect="eager", kind=kind, held=held, rewritten="aside")
    for case in correct_cases(MUTATED):
        many = case.world_size == 4 and case.model in ON_FOUR_RANKS
        chosen = ASIDE if case.rewritten.endswith("aside") else REWRITTEN
        if (case.world_size == 2 or many) and (not case.rewritten or case.model in chosen):
            yield case


def mutants(case: Case, mutator: Mutator) -> Iterator[Mutant]:
    """One mutant per place at which the mutator applies."""
    number = len(list(mutator(case.graph)))
    for i in range(number):
        graph = case.graph
        node, break_it = list(mutator(graph))[i]
        where = node.name
        break_it()
        yield Mutant(case=case, mutator=mutator.__name__, where=where, graph=graph)


def _peak(graph: fx.Graph) -> int:
    return max((used for _, used in liveness.unsharded_bytes(graph)), default=0)
