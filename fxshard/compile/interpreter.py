"""Graphs that torch's FX interpreter runs node by node: `options={"lower": "eager"}`, and graphs without parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph import _BoxedCodeGen

from fxshard.compile.cache import CodeOwner
from fxshard.compile.stages import Stages
from fxshard.ir import launches
from fxshard.ir.launches import Launch
from fxshard.passes._base import GraphKind
from fxshard.runtime.dispatch import GuardedCode


def interpret(gm: fx.GraphModule, inputs: Sequence[Any], stages: Stages, owner: CodeOwner) -> Callable[..., Any]:
    """Take a captured graph through AOTAutograd and all `stages`; `owner` makes the graphs ready to run."""

    def compiler(kind: GraphKind) -> Callable[..., Any]:
        def compile_split(graph: fx.GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
            if stages.leaves_out(kind):
                return boxed(graph, graph_inputs)
            facts = stages.split(graph, kind, ())
            stages.last(graph, kind)
            run = boxed(graph, graph_inputs)
            return owner.prepared(run, facts) if stages.generate_code else run

        return compile_split

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=stages.partition,
        keep_inference_input_mutations=True,  # written in the graph, as Inductor has it: before a recomputation ends
    )
    return backend(gm, inputs)


def interpret_plain(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Run a graph that reads no sharded parameter as it is."""

    def compiler(kind: GraphKind) -> Callable[..., Any]:
        return lambda graph, graph_inputs: guarded(boxed(graph, graph_inputs), kind, launches.sequence(graph.graph))

    kinds: tuple[GraphKind, ...] = ("forward", "backward", "inference")
    forward, backward, inference = map(compiler, kinds)
    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, keep_inference_input_mutations=True
    )
    return backend(gm, inputs)


def guarded(run: Callable[..., Any], kind: GraphKind, launched: Sequence[Launch]) -> Callable[..., Any]:
    """Let ranks agree on the launches of a graph without units: experts that get no rows leave such a graph."""
    return GuardedCode(run, kind, launched) if launched else run


def boxed(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return the graph's own function, which frees each input after its last use, as Inductor's code does."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    run = functools.partial(gm.forward)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
