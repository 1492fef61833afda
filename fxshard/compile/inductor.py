"""Inductor with our stages in it: its configuration, the hooks that it calls, and how it lowers ops of ours."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import ir as inductor_ir
from torch._inductor import lowering
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.exc import InductorError
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import set_tracing_context_output_strides

from fxshard.compile import cudagraphs
from fxshard.compile.cache import CachedCode, CodeOwner, CompiledFacts, stable_text
from fxshard.compile.interpreter import boxed, guarded, interpret_plain
from fxshard.compile.stages import Stages
from fxshard.errors import ConfigError, FxshardError, InvariantError
from fxshard.ir import launches, ops
from fxshard.ir.regions import is_of_region
from fxshard.options import KEEP_ORDER_FLAGS, Options
from fxshard.passes._base import GraphKind

_log = logging.getLogger(__name__)


def require_known_flags(options: Options) -> None:
    """Raise for an Inductor flag that this torch does not have; before anything is sharded or compiled."""
    known = inductor_config.get_config_copy()
    unknown = [name for name in options.inductor if name not in known]
    if unknown:
        raise ConfigError(f"inductor: this torch's torch._inductor.config has no {', '.join(map(repr, unknown))}.")


def order_patches(known: Container[str]) -> dict[str, bool]:
    """Return the configuration that keeps the order of collectives (ADR 0007), as far as this torch has the flags."""
    if missing := tuple(f for f, since in KEEP_ORDER_FLAGS.items() if f not in known and torch.__version__ >= since):
        _say_missing(missing)
    return {name: False for name in KEEP_ORDER_FLAGS if name in known}


@functools.cache
def _say_missing(flags: tuple[str, ...]) -> None:
    _log.warning(
        "fxshard: torch %s has no torch._inductor.config.%s. Its scheduling may undo the order of collectives; "
        "please report this, with the version.",
        torch.__version__,
        " or ".join(flags),
    )


def compile_plain(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Compile a graph that reads no sharded parameter, as torch would."""
    if options.lower == "eager":
        return interpret_plain(gm, inputs)
    patches = dict(options.inductor)
    if not any(map(launches.is_models_own, gm.graph.nodes)):
        return cast("Callable[..., Any]", compile_fx(gm, list(inputs), config_patches=patches))

    def compile_guarded(graph: fx.GraphModule, graph_inputs: Sequence[Any], **kwargs: Any) -> Any:
        kind: GraphKind = "inference" if kwargs.get("is_inference") else "forward"
        kind = "backward" if kwargs.get("is_backward") else kind
        launched = launches.sequence(graph.graph)
        return guarded(compile_fx_inner(graph, list(graph_inputs), **kwargs), kind, launched)

    patches["force_disable_caches"] = True  # a hit would leave out what guards it
    compiled = compile_fx(gm, list(inputs), inner_compile=compile_guarded, config_patches=patches)
    return cast("Callable[..., Any]", compiled)


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], stages: Stages, owner: CodeOwner
) -> Callable[..., Any]:
    """Take a captured graph through AOTAutograd, Inductor and all `stages`; `owner` makes the code ready to run."""
    known, options = inductor_config.get_config_copy(), stages.options
    ours = order_patches(known) | cudagraphs.patches(options, known)
    patches = {**options.inductor, **ours, "custom_partitioner_fn": Partitioner(stages, owner)}
    if not stages.generate_code or stages.digest is None:
        patches["force_disable_caches"] = True  # without code, a hit would end before Inductor's own passes
    inner = _SplitCompiler(stages, owner)
    compiled = compile_fx(gm, list(inputs), inner_compile=inner, config_patches=patches)
    return cast("Callable[..., Any]", compiled)


class _SplitCompiler:
    """Compiles the forward, backward or inference graph; Inductor calls it in place of its own function."""

    def __init__(self, stages: Stages, owner: CodeOwner) -> None:
        self._stages, self._owner = stages, owner

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        stages, options = self._stages, self._stages.options
        kind: GraphKind = "inference" if kwargs.get("is_inference") else "forward"
        if kwargs.get("is_backward"):
            kind = "backward"
        self._owner.found.add(kind)
        if stages.leaves_out(kind):
            cudagraphs.left_out(options, inputs, kwargs)
            if stages.saved is not None:
                set_tracing_context_output_strides(inputs, cast(Any, SimpleNamespace(output_strides=stages.saved)))
            return boxed(gm, inputs)
        facts = stages.split(gm, kind, inputs)
        inputs = [*inputs, *(node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")[len(inputs) :])]
        static = cudagraphs.static_inputs(options, gm.graph, kwargs.get("static_input_idxs", ()))
        with inductor_config.patch(post_grad_custom_post_pass=_LastStages(stages, kind)):
            if stages.generate_code:
                return self._code(gm, inputs, facts, **kwargs | {"static_input_idxs": static})
            _until_code(fx.GraphModule(gm, copy.deepcopy(gm.graph)), inputs, **kwargs)
        return boxed(gm, inputs)

    def _code(self, gm: fx.GraphModule, inputs: Sequence[Any], facts: CompiledFacts, **kwargs: Any) -> Any:
        recorded = self._stages.history.stages
        before, bundled = len(recorded), functorch_config.bundled_autograd_cache
        # For entries of AOTAutograd, which hold the code itself, Inductor passes its own cache over. But that one knows
        # equal graphs of different Dynamo graphs. Where nothing is called, only such an entry makes Inductor compile.
        called = any(node.op.startswith("call_") for node in gm.graph.nodes)
        with functorch_config.patch(bundled_autograd_cache=bundled and not called):
            code = _compile_split(gm, inputs, **kwargs)  # takes the graph over
        cudagraphs.require_recordable(self._stages.options, code, facts.kind)
        if facts.kind == "forward":
            facts = replace(facts, strides=getattr(code, "output_strides", None))
        if len(recorded) == before:
            self._owner.restore(facts)  # found by Inductor: the last stages did not run
        if bundled and isinstance(code, CompiledFxGraph):
            return CachedCode.of(code, facts, self._owner)
        return self._owner.prepared(code, facts)


class Partitioner(CustomPartitionerFn):
    """`Stages.partition` in the form that Inductor's configuration wants; also how a cache finds who asks it."""

    def __init__(self, stages: Stages, owner: CodeOwner) -> None:
        self.stages, self.owner = stages, owner

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """Split the joint graph."""
        return self.stages.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Return what decides the compiled code besides the graph."""
        return self.stages.digest or "not cached"

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        """Return itself: Inductor copies its configuration."""
        return self

    def __getstate__(self) -> str:
        """Show the digest alone: Inductor pickles its whole configuration into the cache key."""
        return self.uuid()


class _LastStages(CustomGraphPass):
    """`Stages.last` in the form that Inductor's configuration wants."""

    def __init__(self, stages: Stages, kind: GraphKind) -> None:
        self._stages, self._kind = stages, kind

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        if gm is None:
            raise InvariantError("Inductor gave the last stage a graph that no module owns.")
        if is_of_region(gm):
            return  # Inductor's own passes come by once for each subgraph
        self._stages.last(gm, self._kind)
        if not self._stages.generate_code:
            raise _StopBeforeCode

    def uuid(self) -> str:
        return f"{self._stages.digest} {self._kind} {stable_text(self._stages.variant)}"


class _StopBeforeCode(BaseException):
    """Ends Inductor's work on a graph that only its passes were wanted for; no `except Exception` stops it."""


def _until_code(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> None:
    """Run Inductor's own passes and our last stages on `gm`, and no further."""
    try:
        _compile_split(gm, inputs, **kwargs)
    except _StopBeforeCode:
        return
    raise InvariantError("Inductor compiled a graph without running the last stages.")


def _compile_split(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Call `compile_fx_inner`, and raise errors of our last stages as they are."""
    try:
        return compile_fx_inner(gm, list(inputs), **kwargs)
    except InductorError as error:
        if isinstance(error.inner_exception, FxshardError):
            raise error.inner_exception from None
        raise


# ---- ops on side streams


def _as_collective(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Lower an op as a collective, whose result is waited for: what it reads is kept until the wait."""

    def lower(*args: Any) -> Any:
        made = inductor_ir._CollectiveKernel.create_out_of_place(op, *args)
        # The wait for a result keeps the input of the same index if the op takes and gives lists, else the first
        # input: such an op takes no other.
        if isinstance(made, list):
            return [inductor_ir.TensorBox.create(tensor) for tensor in made]
        return inductor_ir.TensorBox.create(made)

    return lower


def _zeros(parameters: Sequence[Any], index: int) -> Any:
    """Lower a gradient that is not there: a constant, for which nothing is read."""
    like = parameters[index]
    return lowering.full(like.get_size(), 0, dtype=like.get_dtype(), device=like.get_device())


def _deferred_wait(launched: Any, dtype: torch.dtype | None = None) -> Any:
    """Lower it as a wait, up to which what was sent is kept."""
    inductor_ir._WaitKernel.create_wait(ops.DEFERRED_WAIT, launched)
    return launched


lowering.register_lowering(ops.DEFERRED_WAIT, type_promotion_kind=None)(_deferred_wait)
lowering.register_lowering(ops.ZERO_GRADIENT, type_promotion_kind=None)(_zeros)
lowering.make_fallback(ops.COPY_IN, lowering.require_contiguous)
lowering.make_fallback(ops.KEEP_ROWS, lowering.require_contiguous)
_ON_STREAMS = (ops.ALL_GATHER_ON_STREAM, ops.REDUCE_SCATTER_ON_STREAM, ops.COPY_OUT)
for _op in (*_ON_STREAMS, *ops.BETWEEN_HOST_AND_DEVICE):
    lowering.add_layout_constraint(_op, lowering.constrain_to_fx_strides)
    lowering.register_lowering(_op, type_promotion_kind=None)(_as_collective(_op))
