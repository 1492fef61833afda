"""From a captured graph to something that runs: AOTAutograd with our passes in it, then Inductor or the interpreter.

Private torch modules used here, and nowhere else: `torch._inductor` (compile_fx, custom_graph_pass),
`torch._functorch.config`, `torch._dynamo.backends.common`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError

from fxshard.errors import ConfigError, FxshardError, InvariantError
from fxshard.ir import ops, order
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
    # Keyed on the Dynamo graph, which does not know our passes: a hit would skip them.
    patches: dict[str, Any] = {"enable_autograd_cache": False}
    if not generate_code:
        patches["force_non_lazy_backward_lowering"] = True
    with functorch_config.patch(patches):
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


class _Stages:
    """The passes of one frame, bound to the places where AOTAutograd and Inductor call them."""

    def __init__(self, frame: Frame, pipeline: Pipeline, options: Options, generate_code: bool) -> None:
        self.frame, self.pipeline, self.options, self.generate_code = frame, pipeline, options, generate_code
        self.decompositions = select_decomp_table() if options.lower == "inductor" else {}
        self.num_results: int | None = None

    def interpret(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiler(kind: GraphKind) -> Callable[..., Any]:
            def compile_split(graph: fx.GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
                self.split_stage(graph, kind)
                if self.pipeline.last:
                    self.last_stage(graph, kind)
                run = _boxed(graph, graph_inputs)
                return agreement.guard(run, kind, order.sequence(graph.graph)) if self.generate_code else run

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
        if not self.generate_code:
            patches["force_disable_caches"] = True  # a hit would end before Inductor's own passes
        compiled = compile_fx(gm, list(inputs), inner_compile=self._compile_split, config_patches=patches)
        return cast("Callable[..., Any]", compiled)

    def _compile_split(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        kind: GraphKind = "forward"
        if kwargs.get("is_backward"):
            kind = "backward"
        elif kwargs.get("is_inference"):
            kind = "inference"
        self.split_stage(gm, kind)
        last = {"post_grad_custom_post_pass": _LastStage(self, kind)} if self.pipeline.last else {}
        with inductor_config.patch(last):
            if self.generate_code:
                launches = order.sequence(gm.graph)  # Inductor takes the graph over
                return agreement.guard(_with_inductor(gm, inputs, **kwargs), kind, launches)
            if self.pipeline.last:
                self._until_code(fx.GraphModule(gm, copy.deepcopy(gm.graph)), inputs, **kwargs)
        return _boxed(gm, inputs)

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

    def _context(self, kind: GraphKind) -> PassContext:
        return PassContext(
            plan=self.frame.plan,
            kind=kind,
            decompositions=self.decompositions,
            num_results=self.num_results,
            verify=self.options.verify,
            journal=self.frame.journal,
        )

    @functools.cached_property
    def digest(self) -> str:
        """What decides the compiled code besides the graph: options, plan, passes, versions."""
        parts = (repr(self.options), repr(self.frame.plan), self.pipeline.digest, torch.__version__)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class _Partitioner(CustomPartitionerFn):
    """`_Stages.partition` in the form that Inductor's configuration wants."""

    def __init__(self, stages: _Stages) -> None:
        self._stages = stages

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self._stages.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return self._stages.digest

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

    def uuid(self) -> str:
        return f"{self._stages.digest} {self._kind}"
