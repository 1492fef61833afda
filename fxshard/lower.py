"""From a captured graph to something that runs: AOTAutograd with our passes in it, then Inductor or the interpreter.

Private torch modules used here, and nowhere else: `torch._inductor` (compile_fx, custom_graph_pass, output_code),
`torch._functorch.config`, `torch._dynamo.backends.common`, `torch._guards`.

[Note: caches]
AOTAutograd looks for a Dynamo graph in its cache before any of our passes runs. So that a hit is worth as much as a
compilation, what goes in is a `SharedCode`: Inductor's code together with the facts that our passes found out. When
it comes out, it puts the ranks' agreement before its collectives and tells the frame. A backward is compiled along
with its forward, because an entry is made of both. The journal of a hit has the captured graph only; the rest is made
when somebody looks (`LateJournal`). What the key consists of is in `fxshard/cache.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxshard import cache
from fxshard.cost import hardware
from fxshard.errors import ConfigError, FxshardError, InvariantError
from fxshard.ir import opening, ops, order
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.journal import CAPTURED, LateJournal, Record, snapshot
from fxshard.options import KEEP_ORDER_FLAGS, Options
from fxshard.passes import _manager
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.pipeline import JOINT_GIVEN, LAST_GIVEN, SPLIT_GIVEN, Pipeline
from fxshard.runtime import agreement
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
    """Compile a captured graph with markers; sets `frame.compiled` and fills `frame.journal`.

    Args:
        gm: from Dynamo, with bound markers.
        inputs: of the graph.
        frame: what to fill.
        pipeline: the passes.
        options: the user's.
        generate_code: whether Inductor gets as far as code; without, the graphs are interpreted node by node, and
            backward is compiled at once even where AOTAutograd would wait for its first run.
    """
    frame.journal.begin("dynamo", gm.graph, "as Dynamo captured it")
    stages = _Stages(frame, pipeline, options, generate_code)
    with functorch_config.patch(stages.aot_patches(inputs)):
        if options.lower == "eager":
            frame.compiled = stages.interpret(gm, inputs)
        else:
            frame.compiled = stages.inductor(gm, inputs)


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
    run: Callable[..., Any] = make_boxed_func(gm.forward)
    return run


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What fxshard must know of a compiled graph to run it; kept with its code.

    Attributes:
        kind: of the graph.
        launches: its collectives, in order.
        trained: as in `Frame`.
    """

    kind: GraphKind
    launches: tuple[order.Launch, ...]
    trained: dict[str, list[SlotIndex]]


class SharedCode(CompiledFxGraph):
    """Inductor's code of one graph in the form in which AOTAutograd caches it; see [Note: caches]."""

    facts: Facts

    @classmethod
    def of(cls, compiled: CompiledFxGraph, facts: Facts) -> SharedCode:
        """The same object, with the ranks' agreement before its code."""
        compiled.__class__ = cls  # a copy would not do: the original's `__del__` ends the code that they share
        code = cast(SharedCode, compiled)
        code.facts = facts
        code._guard()
        return code

    def post_compile(self, *args: Any, **kwargs: Any) -> None:
        """Called when the code was found in the cache, in the process that will run it."""
        super().post_compile(*args, **kwargs)
        self._guard()
        partitioner = inductor_config.custom_partitioner_fn  # of the compilation that looks for it
        if not isinstance(partitioner, _Partitioner):
            raise InvariantError("compiled code of fxshard was found by somebody else.")
        partitioner.stages.restore(self.facts)

    def _guard(self) -> None:
        if self.current_callable is None:
            raise InvariantError("Inductor handed over a graph without code.")
        self.current_callable = agreement.guard(self.current_callable, self.facts.kind, self.facts.launches)


class _Stages:
    """The passes of one frame, bound to the places where AOTAutograd and Inductor call them."""

    def __init__(self, frame: Frame, pipeline: Pipeline, options: Options, generate_code: bool) -> None:
        self.frame, self.pipeline, self.options, self.generate_code = frame, pipeline, options, generate_code
        self.journal = frame.journal
        self.ambient = _Ambient.now(self.journal.stages["dynamo"][CAPTURED].graph)
        self.decompositions = select_decomp_table() if options.lower == "inductor" else {}
        self.num_results: int | None = None
        self.found: set[GraphKind] = set()
        """Kinds of the graphs that were compiled, or found in a cache."""

    def aot_patches(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """The configuration of AOTAutograd."""
        if not self.generate_code:
            return {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        # The cache knows a tensor subclass by its global shape: one rank would get the code of another's rows.
        subclasses = any(isinstance(value, Tensor) and is_traceable_wrapper_subclass(value) for value in inputs)
        if subclasses or self.digest is None or self.options.lower == "eager":
            return {"enable_autograd_cache": False}
        if not functorch_config.enable_autograd_cache:
            return {}
        return {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}

    def interpret(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiler(kind: GraphKind) -> Callable[..., Any]:
            def compile_split(graph: fx.GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
                self.split_stage(graph, kind)
                if self.pipeline.last:
                    self.last_stage(graph, kind)
                launches = order.sequence(graph.graph)
                if self.generate_code:
                    self.finish(graph.graph)
                    graph.recompile()
                run = _boxed(graph, graph_inputs)
                return agreement.guard(run, kind, launches) if self.generate_code else run

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
        # Inductor's own schedulers would undo the order of collectives; ADR 0002.
        patches: dict[str, Any] = {name: False for name in KEEP_ORDER_FLAGS if name in known}
        patches |= {**self.options.inductor, "custom_partitioner_fn": _Partitioner(self)}
        if not self.generate_code or self.digest is None:
            patches["force_disable_caches"] = True  # without code, a hit would end before Inductor's own passes
        compiled = compile_fx(gm, list(inputs), inner_compile=self._compile_split, config_patches=patches)
        if not self.found:
            raise InvariantError("AOTAutograd returned code that fxshard has not seen.")
        return cast("Callable[..., Any]", compiled)

    def restore(self, facts: Facts) -> None:
        """Tell the frame what the passes found out when this code was compiled."""
        self.found.add(facts.kind)
        self.frame.trained.update({unit: list(slots) for unit, slots in facts.trained.items()})
        self._replay_when_asked()

    def _compile_split(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        kind: GraphKind = "forward"
        if kwargs.get("is_backward"):
            kind = "backward"
        elif kwargs.get("is_inference"):
            kind = "inference"
        self.found.add(kind)
        self.split_stage(gm, kind)
        last = {"post_grad_custom_post_pass": _LastStage(self, kind)} if self.pipeline.last else {}
        with inductor_config.patch(last):
            if self.generate_code:
                return self._code(gm, inputs, kind, **kwargs)
            if self.pipeline.last:
                self._until_code(fx.GraphModule(gm, copy.deepcopy(gm.graph)), inputs, **kwargs)
        return _boxed(gm, inputs)

    def _code(self, gm: fx.GraphModule, inputs: Sequence[Any], kind: GraphKind, **kwargs: Any) -> Any:
        """Inductor's code, with the ranks' agreement before it."""
        facts = Facts(kind=kind, launches=order.sequence(gm.graph), trained=self.frame.trained)
        stages = len(self.journal.stages)
        bundled = functorch_config.bundled_autograd_cache
        # For entries of AOTAutograd, which hold the code itself, Inductor passes its own cache over. But that one knows
        # equal graphs of different Dynamo graphs. Where nothing is called, only such an entry makes Inductor compile.
        called = any(node.op.startswith("call_") for node in gm.graph.nodes)
        with functorch_config.patch(bundled_autograd_cache=bundled and not called):
            code = _with_inductor(gm, inputs, **kwargs)  # takes the graph over
        if self.pipeline.last and len(self.journal.stages) == stages:
            self._replay_when_asked()  # found by Inductor: the last stage did not run
        if bundled and isinstance(code, CompiledFxGraph):
            return SharedCode.of(code, facts)
        return agreement.guard(code, kind, facts.launches)

    def _replay_when_asked(self) -> None:
        if not isinstance(self.frame.journal, LateJournal):
            self.frame.journal = LateJournal(self._replay)

    def _replay(self) -> dict[str, dict[str, Record]]:
        """Run all passes again, on the graph as Dynamo captured it, and give what the journal then has."""
        graph = self.journal.stages["dynamo"][CAPTURED].graph
        gm = fx.GraphModule(graph.owning_module or nn.Module(), snapshot(graph))
        frame = Frame(
            self.frame.plan,
            hardware=self.frame.hardware,
            unsharded_budget_bytes=self.frame.unsharded_budget_bytes,
        )
        with self.ambient.again():
            lower(gm, self.ambient.inputs, frame, self.pipeline, self.options, generate_code=False)
        return frame.journal.stages

    def _until_code(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> None:
        """Run Inductor's own passes and our last stage on `gm`, and no further."""
        try:
            _with_inductor(gm, inputs, **kwargs)
        except _StopBeforeCode:
            return
        raise InvariantError("Inductor compiled a graph without running the last stage.")

    def partition(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """The joint stage, then torch's min-cut partitioner."""
        self.num_results = kwargs.get("num_fwd_outputs")
        ctx = self._context("joint")
        _manager.run(gm, self.pipeline.joint, ctx, given=JOINT_GIVEN)
        for node in gm.graph.nodes:
            if ops.is_reduce_grad(node):
                key = ops.key_of(node)
                trained = self.frame.trained.setdefault(key.unit, [])
                if (slot := (key.shard, ops.slot_of(node))) not in trained:
                    trained.append(slot)
        return min_cut_rematerialization_partition(gm, inputs, **kwargs)

    def split_stage(self, gm: fx.GraphModule, kind: GraphKind) -> None:
        """The split stage of one graph, in place."""
        _manager.run(gm, self.pipeline.split, self._context(kind), given=SPLIT_GIVEN)

    def last_stage(self, gm: fx.GraphModule, kind: GraphKind) -> None:
        """The last stage of one graph, in place."""
        _manager.run(gm, self.pipeline.last, self._context(kind), given=LAST_GIVEN, stage=f"{kind}_last")

    def finish(self, graph: fx.Graph) -> None:
        """What no pass and no reader of graphs need know of, right before a graph becomes code."""
        is_free = self.options.prefetch not in (0, "off") and self.frame.unsharded_budget_bytes is None
        opening.relay(graph, self.frame.plan, guess=is_free)
        if self.options.lower == "inductor":
            order.enforce(graph)

    def _context(self, kind: GraphKind) -> PassContext:
        return PassContext(
            plan=self.frame.plan,
            kind=kind,
            decompositions=self.decompositions,
            num_results=self.num_results,
            hardware=hardware.load(self.frame.hardware),
            unsharded_budget_bytes=self.frame.unsharded_budget_bytes,
            verify=self.options.verify,
            journal=self.journal,
        )

    @functools.cached_property
    def digest(self) -> str | None:
        """What decides the compiled code besides the graph; `None` if it may not be cached."""
        return cache.digest(self.options, self.frame.plan, self.pipeline, hardware.load(self.frame.hardware))


@dataclass(frozen=True, kw_only=True)
class _Ambient:
    """What a compilation reads from around it.

    Attributes:
        inputs: of the graph, fake.
        mode: their fake mode.
        grad: whether gradients are recorded.
        autocast: device type, dtype and whether it is on.
    """

    inputs: list[Any]
    mode: Any
    grad: bool
    autocast: tuple[str, torch.dtype, bool]

    @classmethod
    def now(cls, graph: fx.Graph) -> _Ambient:
        """Of a compilation of `graph`, which Dynamo captured, that begins now."""
        inputs = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        device = tensors[0].device.type  # a flat is among them
        autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return cls(inputs=inputs, mode=detect_fake_mode(tensors), grad=torch.is_grad_enabled(), autocast=autocast)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """As it was then."""
        device, dtype, on = self.autocast
        with tracing(TracingContext(self.mode)), torch.set_grad_enabled(self.grad), torch.autocast(device, dtype, on):
            yield


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
    """`compile_fx_inner`, with the errors of our last stage as they are."""
    try:
        return compile_fx_inner(gm, list(inputs), **kwargs)
    except InductorError as error:
        if isinstance(error.inner_exception, FxshardError):
            raise error.inner_exception from None
        raise


class _StopBeforeCode(BaseException):
    """Ends Inductor's work on a graph that only its passes were wanted for; no `except Exception` stops it."""


class _LastStage(CustomGraphPass):
    """`_Stages.last_stage` in the form that Inductor's configuration wants."""

    def __init__(self, stages: _Stages, kind: GraphKind) -> None:
        self._stages, self._kind = stages, kind

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        if gm is None:
            raise InvariantError("Inductor gave the last stage a graph that no module owns.")
        self._stages.last_stage(gm, self._kind)
        if not self._stages.generate_code:
            raise _StopBeforeCode
        self._stages.finish(graph)

    def uuid(self) -> str:
        return f"{self._stages.digest} {self._kind}"
