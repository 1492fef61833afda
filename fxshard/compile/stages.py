"""The stages of one captured graph: which passes run at which of the places where AOTAutograd and Inductor call us."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch import fx
from torch._inductor.decomposition import select_decomp_table

from fxshard.compile import cache, regions
from fxshard.compile.cache import CompiledFacts, Strides
from fxshard.ir import buckets, launches, ops, signature
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.graph_edit import TracedCode
from fxshard.ir.history import Stage
from fxshard.ir.regions import Region, copied
from fxshard.ir.variant import PLAIN, Variant
from fxshard.options import Options
from fxshard.passes import _manager
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.pipeline import JOINT_GIVEN, LAST_GIVEN, SPLIT_GIVEN, Pipeline, codegen_given, in_step, of_variant
from fxshard.runtime import dispatch
from fxshard.runtime.frame import Frame


class Stages:
    """The passes of one frame, a method for each stage, in the order in which a graph goes through them.

    `only` is the one kind of graph that is compiled for a `variant` other than the plain one, `None` for all. Without
    `generate_code` the codegen stage runs on copies. `traced` is code that passes have traced for any graph of the
    frame. `saved` is how the results of the plain forward lie, where a backward alone is compiled. With `saves_all`
    forward keeps for backward what autograd would keep without a compiler.
    """

    def __init__(
        self,
        frame: Frame,
        pipeline: Pipeline,
        options: Options,
        *,
        variant: Variant = PLAIN,
        only: GraphKind | None = None,
        generate_code: bool = True,
        traced: TracedCode | None = None,
        saved: Strides = None,
        saves_all: bool = False,
    ) -> None:
        self.frame, self.pipeline, self.options = frame, pipeline, options
        self.history = frame.history  # the frame has another one later, if its code comes out of a cache
        self.variant, self.only, self.generate_code = variant, only, generate_code
        self.traced: TracedCode = {} if traced is None else traced
        self.saved, self.saves_all = saved, saves_all
        self._decompositions = select_decomp_table() if options.lower == "inductor" else {}
        self._num_results: int | None = None

    def leaves_out(self, kind: GraphKind) -> bool:
        """Return whether a graph of this kind has been compiled already, for the plain variant."""
        return self.only not in (None, kind)

    def capture(self, gm: fx.GraphModule) -> None:
        """Run the dynamo stage of the graph that Dynamo captured, in place."""
        context = self._context("dynamo")
        _manager.run(gm, self.pipeline.dynamo, context, given=())
        self.frame.plan = context.plan

    def partition(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Run the joint stage, then a partitioner of torch's."""
        self._num_results = kwargs.get("num_fwd_outputs")
        _manager.run(gm, self.pipeline.joint, self._context("joint"), given=JOINT_GIVEN)
        self.frame.trained.update(signature.trained_by(gm.graph))
        split = default_partition if self.saves_all else min_cut_rematerialization_partition
        return split(gm, inputs, **kwargs)

    def split(self, gm: fx.GraphModule, kind: GraphKind, inputs: Sequence[Any]) -> CompiledFacts:
        """Run the split stage of one graph, in place; return what must be known of the graph to run it."""
        facts, gradients = self._facts(gm.graph, kind, inputs), signature.gradients_of(gm.graph)
        passes = in_step(self.pipeline.split) if self.frame.plan.in_step else self.pipeline.split
        if self.variant != PLAIN:
            passes = of_variant(passes, self.variant, self.options.lower)
        _manager.run(gm, passes, self._context(kind), given=SPLIT_GIVEN, stage=self._named(kind))
        results = enumerate(signature.results_of(gm.graph))
        late = {i: gradients[i] for i, r in results if isinstance(r, fx.Node) and r.target is ops.DEFERRED_WAIT}
        sequence = launches.sequence(gm.graph, buckets.parts_of(gm.graph, self.frame.plan))
        return replace(facts, launches=sequence, late=late)

    def last(self, gm: fx.GraphModule, kind: GraphKind) -> None:
        """Run the last and the codegen stage of one graph, in place; the latter on a copy where no code is made."""
        # The interpreter has no passes of its own between the split stage and this one.
        kept = self.history.last() if self.options.lower == "eager" else None
        if self.pipeline.last:
            stage = replace(self._named(kind), phase="last")
            _manager.run(gm, self.pipeline.last, self._context(kind), given=LAST_GIVEN, stage=stage, follows=kept)
            kept = self.history.last()
        if not self.generate_code:
            gm = copied(gm)
        given, stage = codegen_given(self.options), replace(self._named(kind), phase="codegen")
        _manager.run(gm, self.pipeline.codegen, self._context(kind), given=given, stage=stage, follows=kept)

    @functools.cached_property
    def digest(self) -> str | None:
        """What decides the compiled code besides the graph; `None` if it may not be cached."""
        return cache.digest(self.options, self.frame.plan, self.pipeline, self.frame.hardware)

    def _named(self, kind: GraphKind) -> Stage:
        return Stage(kind, "" if self.variant == PLAIN else self.variant.name(self.frame.trained))

    def _facts(self, graph: fx.Graph, kind: GraphKind, inputs: Sequence[Any]) -> CompiledFacts:
        reads: dict[str, list[SlotIndex]] = {}
        for unit, shard, slot in dict.fromkeys(ops.parameter_key_of(n) for n in graph.nodes if ops.is_unshard(n)):
            reads.setdefault(unit, []).append((shard, slot))
        return CompiledFacts(
            kind=kind,
            launches=(),
            trained=self.frame.trained,
            reads=reads,
            inputs=signature.inputs_of(graph),
            outputs=tuple(signature.type_of(result) for result in signature.results_of(graph)),
            layouts=dispatch.layouts_of(inputs) if kind == "backward" else {},
        )

    def _context(self, kind: GraphKind) -> PassContext:
        return PassContext(
            plan=self.variant.plan(self.frame.plan),
            kind=kind,
            decompositions=self._decompositions,
            traced=self.traced,
            num_results=self._num_results,
            hardware=self.frame.hardware,
            unsharded_budget_bytes=self.frame.unsharded_budget_bytes,
            verify=self.options.verify,
            history=self.history,
            trace_region=self._trace_region,
        )

    def _trace_region(self, name: str, text: str, gm: fx.GraphModule, parameters: list[bool]) -> Region | str:
        region = regions.trace(name, text, gm, parameters, self.options)
        if isinstance(region, Region):
            self.history.regions.append(region)  # kept: the ops find them by name
        return region
