"""From a captured graph to something that runs: AOTAutograd with our passes in it, then Inductor or the interpreter.

[Note: caches]
AOTAutograd looks for a Dynamo graph in its cache before any of our passes runs. So that a hit is worth as much as a
compilation, what goes in is a `CachedCode`: Inductor's code together with the facts that our passes found out. When
it comes out, it puts the ranks' agreement before its collectives and tells the frame. A backward is compiled along
with its forward, because an entry is made of both. The history of a hit has the captured graph only; the rest is made
when somebody looks (`LazyHistory`). What the key consists of is in `fxshard/compile/cache.py`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.output_code import CompiledFxGraph
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxshard.compile import cache, cudagraphs
from fxshard.compile import lowerings as lowerings
from fxshard.compile.cache import CachedCode, CompiledFacts
from fxshard.compile.context import CompileContext
from fxshard.cost import hardware
from fxshard.errors import ConfigError, FxshardError, InvariantError
from fxshard.ir import launches, ops
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.graph_edit import Traced
from fxshard.ir.history import CAPTURED, LazyHistory, PassResult, snapshot, with_variant
from fxshard.ir.variant import PLAIN, Variant
from fxshard.ir.verify import baseline
from fxshard.options import KEEP_ORDER_FLAGS, Options
from fxshard.passes import _manager
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.pipeline import JOINT_GIVEN, LAST_GIVEN, SPLIT_GIVEN, Pipeline, codegen_given, of_variant
from fxshard.runtime import dispatch, rank_check
from fxshard.runtime.dispatch import BackwardDispatch, Code, ForwardDispatch
from fxshard.runtime.frame import Frame


def lower(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    frame: Frame,
    pipeline: Pipeline,
    options: Options,
    *,
    generate_code: bool = True,
) -> None:
    """Compile a captured graph with markers; sets `frame.compiled` and fills `frame.history`.

    Args:
        gm: from Dynamo, with bound markers.
        inputs: of the graph.
        frame: what to fill.
        pipeline: the passes.
        options: the user's.
        generate_code: whether Inductor gets as far as code; without, the graphs are interpreted node by node, and
            backward is compiled at once even where AOTAutograd would wait for its first run.
    """
    frame.history.begin("dynamo", gm.graph, "as Dynamo captured it")
    stages = _Stages(frame, pipeline, options, generate_code)
    frame.compiled = stages.run(gm, inputs)


def require_known_flags(options: Options) -> None:
    """Raise for an Inductor flag that this torch does not have; before anything is sharded or compiled."""
    known = inductor_config.get_config_copy()
    unknown = [name for name in options.inductor if name not in known]
    if unknown:
        raise ConfigError(f"inductor: this torch's torch._inductor.config has no {', '.join(map(repr, unknown))}.")


def lower_plain(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Compile a graph that reads no sharded parameter, as torch would."""
    if options.lower == "eager":
        return aot_autograd(fw_compiler=_boxed, bw_compiler=_boxed)(gm, inputs)
    return cast("Callable[..., Any]", compile_fx(gm, list(inputs), config_patches=dict(options.inductor)))


def _boxed(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    gm.graph.set_codegen(_BoxedCodeGen())  # an input is freed after its last use, as in Inductor's code
    gm.recompile()
    run = functools.partial(gm.forward)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Stages:
    """The passes of one frame, bound to the places where AOTAutograd and Inductor call them.

    Those of a variant other than the plain one compile one graph and nothing else.
    """

    def __init__(
        self,
        frame: Frame,
        pipeline: Pipeline,
        options: Options,
        generate_code: bool,
        variant: Variant = PLAIN,
        only: GraphKind | None = None,
    ) -> None:
        self.frame, self.pipeline, self.options, self.generate_code = frame, pipeline, options, generate_code
        self.variant, self.only = variant, only
        self.made: dict[GraphKind, tuple[Callable[..., Any], CompiledFacts]] = {}
        """The code of each graph with the ranks' agreement before it, once there is any."""
        self.history = frame.history
        self.ambient = CompileContext.now(self.history.stages["dynamo"][CAPTURED].graph)
        self.decompositions = select_decomp_table() if options.lower == "inductor" else {}
        self.traced: Traced = {}
        self.num_results: int | None = None
        self.found: set[GraphKind] = set()
        """Kinds of the graphs that were compiled, or found in a cache."""

    def aot_patches(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """The configuration of AOTAutograd."""
        if not self.generate_code or self.only is not None:
            at_once = self.only in (None, "backward")
            # What a resident forward saves may be the unit's own copy: no memory for backward to reuse.
            may_reuse = {} if not self.variant.resident else {"donated_buffer": False}
            return {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": at_once, **may_reuse}
        # The cache knows a tensor subclass by its global shape: one rank would get the code of another's rows.
        subclasses = any(isinstance(value, Tensor) and is_traceable_wrapper_subclass(value) for value in inputs)
        if subclasses or self.digest is None or self.options.lower == "eager" or self.options.cudagraphs:
            return {"enable_autograd_cache": False}
        both = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}
        return both if functorch_config.enable_autograd_cache else {}

    def run(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Lower the captured graph."""
        with functorch_config.patch(self.aot_patches(inputs)):
            return self.interpret(gm, inputs) if self.options.lower == "eager" else self.inductor(gm, inputs)

    def interpret(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiler(kind: GraphKind) -> Callable[..., Any]:
            def compile_split(graph: fx.GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
                if self.leaves_out(kind):
                    return _boxed(graph, graph_inputs)
                facts = self.facts(graph.graph, kind, ())
                self.split_stage(graph, kind)
                self.last_stage(graph, kind)
                facts = replace(facts, launches=launches.sequence(graph.graph))
                self.codegen_stage(graph if self.generate_code else _copied(graph), kind)
                run = _boxed(graph, graph_inputs)
                return self.prepared(run, facts) if self.generate_code else run

            return compile_split

        backend = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=self.partition,
        )
        return backend(gm, inputs)

    def inductor(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        known = inductor_config.get_config_copy()
        # Inductor's own schedulers would undo the order of collectives; ADR 0008.
        ours = {name: False for name in KEEP_ORDER_FLAGS if name in known} | cudagraphs.patches(self.options, known)
        patches = {**self.options.inductor, **ours, "custom_partitioner_fn": _Partitioner(self)}
        if not self.generate_code or self.digest is None:
            patches["force_disable_caches"] = True  # without code, a hit would end before Inductor's own passes
        compiled = compile_fx(gm, list(inputs), inner_compile=self._compile_split, config_patches=patches)
        if not self.found:
            raise InvariantError("AOTAutograd returned code that fxshard has not seen.")
        return cast("Callable[..., Any]", compiled)

    def restore(self, facts: CompiledFacts) -> None:
        """Tell the frame what the passes found out when this code was compiled."""
        self.found.add(facts.kind)
        self.frame.trained.update({unit: list(slots) for unit, slots in facts.trained.items()})
        self._replay_when_asked()

    def _compile_split(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        kind: GraphKind = "inference" if kwargs.get("is_inference") else "forward"
        if kwargs.get("is_backward"):
            kind = "backward"
        self.found.add(kind)
        if self.leaves_out(kind):
            cudagraphs.left_out(self.options, inputs, kwargs)
            return _boxed(gm, inputs)
        facts = self.facts(gm.graph, kind, inputs)
        self.split_stage(gm, kind)
        inputs = [*inputs, *(node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")[len(inputs) :])]
        static = cudagraphs.static_inputs(self.options, gm.graph, kwargs.get("static_input_idxs", ()))
        with inductor_config.patch(post_grad_custom_post_pass=_LastStages(self, kind)):
            if self.generate_code:
                facts = replace(facts, launches=launches.sequence(gm.graph))
                return self._code(gm, inputs, facts, **kwargs | {"static_input_idxs": static})
            self._until_code(fx.GraphModule(gm, copy.deepcopy(gm.graph)), inputs, **kwargs)
        return _boxed(gm, inputs)

    def _code(self, gm: fx.GraphModule, inputs: Sequence[Any], facts: CompiledFacts, **kwargs: Any) -> Any:
        """Inductor's code, ready to run."""
        stages = len(self.history.stages)
        bundled = functorch_config.bundled_autograd_cache
        # For entries of AOTAutograd, which hold the code itself, Inductor passes its own cache over. But that one knows
        # equal graphs of different Dynamo graphs. Where nothing is called, only such an entry makes Inductor compile.
        called = any(node.op.startswith("call_") for node in gm.graph.nodes)
        with functorch_config.patch(bundled_autograd_cache=bundled and not called):
            code = _with_inductor(gm, inputs, **kwargs)  # takes the graph over
        cudagraphs.require_recordable(self.options, code, facts.kind)
        if len(self.history.stages) == stages:
            self._replay_when_asked()  # found by Inductor: the last stages did not run
        if bundled and isinstance(code, CompiledFxGraph):
            return CachedCode.of(code, facts, self)
        return self.prepared(code, facts)

    def leaves_out(self, kind: GraphKind) -> bool:
        """Whether a graph of this kind has been compiled already, for the plain variant."""
        return self.only not in (None, kind)

    def facts(self, graph: fx.Graph, kind: GraphKind, inputs: Sequence[Any]) -> CompiledFacts:
        """What must be known of a graph before its markers are replaced; of its launches nothing yet."""
        reads: dict[str, list[SlotIndex]] = {}
        for unit, shard, slot in dict.fromkeys(baseline.parameter_key_of(n) for n in graph.nodes if ops.is_unshard(n)):
            reads.setdefault(unit, []).append((shard, slot))
        return CompiledFacts(
            kind=kind,
            launches=(),
            trained=self.frame.trained,
            reads=reads,
            inputs=baseline.inputs_of(graph),
            outputs=tuple(baseline.type_of(result) for result in baseline.results_of(graph)),
            orders=dispatch.orders_of(inputs) if kind == "backward" else {},
        )

    def prepared(self, code: Callable[..., Any], facts: CompiledFacts) -> Callable[..., Any]:
        """A graph's code with the ranks' agreement before it, and in front of it the choice of its variant."""
        code = cudagraphs.guarded(self.options, code, facts.kind, counters["inductor"])
        run = rank_check.guard(code, facts.kind, facts.launches)
        self.made[facts.kind] = run, facts
        if self.only is not None:
            return run
        dispatch = BackwardDispatch if facts.kind == "backward" else ForwardDispatch
        compile_variant = functools.partial(self.compile_variant, facts.kind)
        return dispatch(Code(run, facts.orders), facts.reads, self.frame, compile_variant)

    def compile_variant(self, kind: GraphKind, which: Variant) -> Code:
        """The code of another variant of a graph, made as the plain one was."""
        stages = self._again(which, kind, generate_code=True)
        made = stages.made.get(kind)
        if made is None or made[1].signature != self.made[kind][1].signature:
            name = which.name(self.frame.trained)
            raise InvariantError(f"the {name} {kind} takes or gives other things than the plain one.")
        ours, theirs = self.frame.history, stages.frame.history
        self.frame.history = LazyHistory(lambda: with_variant(ours, theirs, kind))
        return Code(made[0], made[1].orders)

    def _replay_when_asked(self) -> None:
        if not isinstance(self.frame.history, LazyHistory):
            self.frame.history = LazyHistory(self._replay)

    def _replay(self) -> dict[str, dict[str, PassResult]]:
        """Run all passes again, and give what the history then has."""
        return self._again(self.variant, self.only, generate_code=False).history.stages

    def _again(self, variant: Variant, only: GraphKind | None, *, generate_code: bool) -> _Stages:
        """Lower the graph as Dynamo captured it once more, into a frame of its own."""
        graph = self.history.stages["dynamo"][CAPTURED].graph
        gm = fx.GraphModule(graph.owning_module or nn.Module(), snapshot(graph))
        frame = Frame(
            self.frame.plan,
            hardware=self.frame.hardware,
            unsharded_budget_bytes=self.frame.unsharded_budget_bytes,
        )
        frame.history.begin("dynamo", gm.graph, "as Dynamo captured it")
        with self.ambient.again():
            stages = _Stages(frame, self.pipeline, self.options, generate_code, variant, only)
            stages.traced = self.traced
            stages.run(gm, self.ambient.inputs)
        return stages

    def _until_code(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> None:
        """Run Inductor's own passes and our last stages on `gm`, and no further."""
        try:
            _with_inductor(gm, inputs, **kwargs)
        except _StopBeforeCode:
            return
        raise InvariantError("Inductor compiled a graph without running the last stages.")

    def partition(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """The joint stage, then torch's min-cut partitioner."""
        self.num_results = kwargs.get("num_fwd_outputs")
        ctx = self._context("joint")
        _manager.run(gm, self.pipeline.joint, ctx, given=JOINT_GIVEN)
        self.frame.trained.update(baseline.trained_by(gm.graph))
        return min_cut_rematerialization_partition(gm, inputs, **kwargs)

    def split_stage(self, gm: fx.GraphModule, kind: GraphKind) -> None:
        """The split stage of one graph, in place."""
        passes = self.pipeline.split
        if self.variant != PLAIN:
            passes = of_variant(passes, self.variant, self.options.lower)
        _manager.run(gm, passes, self._context(kind), given=SPLIT_GIVEN, stage=self._named(kind))

    def last_stage(self, gm: fx.GraphModule, kind: GraphKind) -> None:
        """The last stage of one graph, in place."""
        if self.pipeline.last:
            stage = f"{self._named(kind)}_last"
            _manager.run(gm, self.pipeline.last, self._context(kind), given=LAST_GIVEN, stage=stage)

    def codegen_stage(self, gm: fx.GraphModule, kind: GraphKind) -> None:
        """The codegen stage of one graph, in place."""
        given, stage = codegen_given(self.options), f"{self._named(kind)}_codegen"
        _manager.run(gm, self.pipeline.codegen, self._context(kind), given=given, stage=stage)

    def _named(self, kind: GraphKind) -> str:
        """What the history calls the stages of a graph."""
        return kind if self.variant == PLAIN else f"{kind}_{self.variant.name(self.frame.trained)}"

    def _context(self, kind: GraphKind) -> PassContext:
        return PassContext(
            plan=self.frame.plan,
            kind=kind,
            decompositions=self.decompositions,
            traced=self.traced,
            num_results=self.num_results,
            hardware=hardware.load(self.frame.hardware),
            unsharded_budget_bytes=self.frame.unsharded_budget_bytes,
            verify=self.options.verify,
            history=self.history,
        )

    @functools.cached_property
    def digest(self) -> str | None:
        """What decides the compiled code besides the graph; `None` if it may not be cached."""
        return cache.digest(self.options, self.frame.plan, self.pipeline, hardware.load(self.frame.hardware))


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The module with a copy of its graph, to see what becomes of it."""
    return fx.GraphModule(gm, snapshot(gm.graph))


class _Partitioner(CustomPartitionerFn):
    """`_Stages.partition` in the form that Inductor's configuration wants."""

    def __init__(self, stages: _Stages) -> None:
        self.stages = stages

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self.stages.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return self.stages.digest or "not cached"

    def __deepcopy__(self, memo: dict[int, Any]) -> _Partitioner:
        return self

    def __getstate__(self) -> str:
        # Inductor pickles its whole configuration into the cache key; of us it must see the digest and nothing else.
        return self.uuid()


def _with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """`compile_fx_inner`, with the errors of our last stages as they are."""
    try:
        return compile_fx_inner(gm, list(inputs), **kwargs)
    except InductorError as error:
        if isinstance(error.inner_exception, FxshardError):
            raise error.inner_exception from None
        raise


class _StopBeforeCode(BaseException):
    """Ends Inductor's work on a graph that only its passes were wanted for; no `except Exception` stops it."""


class _LastStages(CustomGraphPass):
    """The last and the codegen stage in the form that Inductor's configuration wants."""

    def __init__(self, stages: _Stages, kind: GraphKind) -> None:
        self._stages, self._kind = stages, kind

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        if gm is None:
            raise InvariantError("Inductor gave the last stage a graph that no module owns.")
        self._stages.last_stage(gm, self._kind)
        self._stages.codegen_stage(gm, self._kind)
        if not self._stages.generate_code:
            raise _StopBeforeCode

    def uuid(self) -> str:
        return f"{self._stages.digest} {self._kind} {self._stages.variant}"
