"""From a captured graph to something that runs: AOTAutograd with our passes in it, then Inductor or the interpreter.

Private torch modules used here, and nowhere else: `torch._inductor` (compile_fx, custom_graph_pass),
`torch._functorch.config`, `torch._dynamo.backends.common`.
"""

from __future__ import annotations

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
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table

from fxshard.errors import ConfigError
from fxshard.ir import collectives, ops, text
from fxshard.options import KEEP_ORDER_FLAGS, Options
from fxshard.passes import _manager
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.pipeline import JOINT_GIVEN, SPLIT_GIVEN, Pipeline
from fxshard.runtime.frame import CompiledGraph, Frame


def lower(gm: fx.GraphModule, inputs: Sequence[Any], frame: Frame, pipeline: Pipeline, options: Options) -> None:
    """Compile a captured graph with markers; sets `frame.compiled`."""
    stages = _Stages(frame, pipeline, options)
    # Keyed on the Dynamo graph, which does not know our passes: a hit would skip them.
    with functorch_config.patch(enable_autograd_cache=False):
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

    def __init__(self, frame: Frame, pipeline: Pipeline, options: Options) -> None:
        self.frame, self.pipeline, self.options = frame, pipeline, options
        self.decompositions = select_decomp_table() if options.lower == "inductor" else {}

    def interpret(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiler(kind: GraphKind) -> Callable[..., Any]:
            return lambda graph, graph_inputs: _boxed(self.split_stage(graph, kind), graph_inputs)

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
        compiled = compile_fx(gm, list(inputs), inner_compile=self._compile_split, config_patches=patches)
        return cast("Callable[..., Any]", compiled)

    def _compile_split(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        kind: GraphKind = "forward"
        if kwargs.get("is_backward"):
            kind = "backward"
        elif kwargs.get("is_inference"):
            kind = "inference"
        return compile_fx_inner(self.split_stage(gm, kind), list(inputs), **kwargs)

    def partition(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """The joint stage, then torch's min-cut partitioner."""
        ctx = self._context("joint")
        _manager.run(gm, self.pipeline.joint, ctx, given=JOINT_GIVEN)
        for node in gm.graph.nodes:
            if ops.is_reduce_grad(node):
                key = ops.key_of(node)
                trained = self.frame.trained.setdefault(key.unit, [])
                if (slot := (key.shard, ops.slot_of(node))) not in trained:
                    trained.append(slot)
        return min_cut_rematerialization_partition(gm, inputs, **kwargs)

    def split_stage(self, gm: fx.GraphModule, kind: GraphKind) -> fx.GraphModule:
        """The split stage of one graph; keeps its text for the user."""
        _manager.run(gm, self.pipeline.split, self._context(kind), given=SPLIT_GIVEN)
        launches = {
            "all_gather": len(collectives.unshard_launches(gm.graph)),
            "reduce_scatter": len(collectives.reduce_launches(gm.graph)),
        }
        used = {op: count for op, count in launches.items() if count}
        self.frame.graphs.append(CompiledGraph(kind=kind, text=text.graph_text(gm.graph), collectives=used))
        return gm

    def _context(self, kind: GraphKind) -> PassContext:
        return PassContext(plan=self.frame.plan, kind=kind, decompositions=self.decompositions)

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
