"""Regions: code of a repeated module that is traced once and called as often as the module is.

[Note: regions]
A transformer has the same block many times. Tracing, splitting and lowering each of them costs a second apiece, and all
come out alike. `passes/outline_regions.py` finds them in Dynamo's graph and puts a call in the place of each:
`fxshard::region(operands, name, call)`. `call` is a number, for torch makes one of calls that are the same, and a
region may draw random numbers. Parameters are operands, so the markers stay outside, and what gathers, reduces and
schedules sees units as before, in a graph with a few nodes per block. AOTAutograd traces a region by itself and once;
in the whole model's graph each of its calls is one node, and `fxshard::region_backward` one node of backward.
`passes/call_regions.py` replaces both by `invoke_subgraph`, torch's op for a subgraph, which Inductor lowers once.

Inductor has a list of the inputs that a backward may overwrite, by number, and reads it for the inputs of a subgraph,
too (torch/_inductor/graph.py, `bw_donated_idxs`): a region would overwrite what the graph still needs. So
`compile/variants.py` gives no input away where there are regions. It also takes each result of a subgraph for memory of
its own, and writes there what comes later. A result that lies in the memory of an operand, such as a gradient that a
residual connection hands on as it is, would then be overwritten while it is read. So a region returns no such result:
`passed` says which gradients are inputs of backward, and the call's reader takes these.

Source: torch's `nested_compile_region` (torch/_higher_order_ops/invoke_subgraph.py), which the user writes, which runs
through AOTAutograd once per call, and which a parameter's gather would be inside of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from fxshard.ir import liveness, ops, text
from fxshard.ir.history import Snapshot

INVOKE = torch.ops.higher_order.invoke_subgraph


class Source(NamedTuple):
    """Where backward takes an input from; operands, results, saved tensors and gradients are numbered by themselves."""

    kind: Literal["operand", "result", "saved", "gradient"]
    number: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Region:
    """The graphs of code that is called several times."""

    name: str  # of the module's class, numbered, and behind a colon a digest of what decides the code
    forward: fx.GraphModule  # operands -> results, then what is saved for backward and is no operand
    num_results: int  # how many of its outputs are results
    # see `sources` -> the gradients of operands that have one; `None` where nothing trains
    backward: fx.GraphModule | None = None
    differentiable: tuple[int, ...] = ()  # the results that have a gradient, by index
    sources: tuple[Source, ...] = ()  # what backward reads, input by input
    trained: tuple[int, ...] = ()  # the operands whose gradients backward returns, by index, in that order
    # operand -> the input of backward that is its gradient as it is, both by index
    passed: Mapping[int, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name without the digest: the same on every machine, and in every torch."""
        return self.name.partition(":")[0]


_KNOWN: dict[str, list[weakref.ref[Region]]] = {}  # equal names, equal code


def remember(region: Region) -> Region:
    """Let the ops find a region by its name, for as long as somebody keeps it."""
    alive = [reference for reference in _KNOWN.get(region.name, ()) if reference() is not None]
    _KNOWN[region.name] = [*alive, weakref.ref(region)]
    return region


def _known(name: str) -> Region:
    return next(region for reference in reversed(_KNOWN[name]) if (region := reference()) is not None)


def region_of(call: fx.Node) -> Region:
    """Return the region that a node calls, forward or backward."""
    return _known(str(call.args[1]))


def is_call(node: fx.Node) -> bool:
    """Whether a node calls a region, forward or backward."""
    return node.target in (ops.REGION, ops.REGION_BACKWARD)


def called_by(node: fx.Node) -> str:
    """Name the code that a node calls; empty if it calls none."""
    if is_call(node):
        return f"{region_of(node).label}_{'forward' if node.target is ops.REGION else 'backward'}"
    return str(node.args[1]) if node.target in (INVOKE, interpret) else ""


def copied(code: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph of a region, for one compilation to lower, which edits it."""
    return fx.GraphModule(code, Snapshot(code.graph).copy())


def add_code(gm: fx.GraphModule, name: str, code: fx.GraphModule) -> str:
    """Add a region's graph to a module, under a name that nothing there has; return it."""
    name = text.free_name(name, dir(gm))
    code.meta["fxshard_region"] = True
    gm.add_submodule(name, code)
    return name


def is_of_region(gm: fx.GraphModule) -> bool:
    """Whether a graph that is about to be lowered is a region's."""
    return bool(gm.meta.get("fxshard_region"))


def interpret(code: fx.GraphModule, name: str, *operands: Tensor) -> Sequence[Tensor]:
    """Do what `INVOKE` does, which most dispatch modes refuse (a tracker of memory)."""
    results: Sequence[Tensor] = code(*operands)
    return results


def operands_of(call: fx.Node) -> list[fx.Node]:
    """Return what a call gives the code that it calls."""
    return list(call.args[0] if is_call(call) else call.args[2:])  # type: ignore[arg-type]


def code_of(node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a node calls, `None` for a node that calls none."""
    if is_call(node):
        region = region_of(node)
        return region.forward if node.target is ops.REGION else region.backward
    if node.target not in (INVOKE, interpret):
        return None
    subgraph, owner = node.args[0], node.graph.owning_module
    assert isinstance(subgraph, fx.Node)
    assert owner is not None
    return owner.get_submodule(str(subgraph.target))  # type: ignore[return-value]


def codes_in(graph: fx.Graph) -> set[fx.GraphModule]:
    """Return the graphs that the nodes of a graph call."""
    return {code for node in graph.nodes if (code := code_of(node)) is not None}


def layout_of(node: fx.Node) -> tuple[object, ...]:
    """Return what decides whether code that was traced with one tensor takes another: shape, strides, dtype, device."""
    value = node.meta["val"]
    return tuple(value.shape), tuple(value.stride()), value.dtype, str(value.device)


def results_of(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the outputs of a region's graph."""
    (results,) = gm.graph.output_node().args
    return list(results)  # type: ignore[arg-type]


def shared_results(gm: fx.GraphModule) -> list[int]:
    """Return the results of a region's graph that lie in the memory of an input or of an earlier result, by index."""
    live = liveness.liveness(gm.graph)
    taken = {i for place in gm.graph.find_nodes(op="placeholder") for i in live.storages_of[place]}
    found: list[int] = []
    for index, result in enumerate(results_of(gm)):
        storages = live.storages_of[result]
        if not taken.isdisjoint(storages):
            found.append(index)
        taken.update(storages)
    return found


def is_dense(value: Tensor) -> bool:
    """Return whether a tensor has each element once and no gaps between them, in any order of its dimensions."""
    return value.permute(_order_of(value.stride())).is_contiguous()


def _order_of(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _with_strides(value: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor that lies in memory as the strides of a dense one of its shape say."""
    if value.stride() == tuple(strides):
        return value
    order = _order_of(strides)
    back = sorted(range(len(order)), key=order.__getitem__)
    return value.permute(order).contiguous().permute(back)


def _like_outputs(gm: fx.GraphModule, like: Tensor) -> list[Tensor]:
    values = [node.meta["val"] for node in results_of(gm)]
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    operands, name, ctx.call = inputs
    ctx.region, ctx.num_operands = _known(name), len(operands)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(x for i, x in enumerate(output) if i not in ctx.region.differentiable))
    values = {"operand": operands, "result": output, "saved": output[ctx.region.num_results :]}
    kept = [source for source in ctx.region.sources if source.kind != "gradient"]
    ctx.layouts = [(output[i].shape, output[i].dtype, output[i].device) for i in ctx.region.differentiable]
    ctx.save_for_backward(*(values[source.kind][source.number] for source in kept))


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, None, None]:
    region, count = ctx.region, ctx.num_operands
    known = [
        torch.zeros(shape, dtype=dtype, device=device) if (grad := grads[i]) is None else grad
        for i, (shape, dtype, device) in zip(region.differentiable, ctx.layouts, strict=True)
    ]
    kept, places = iter(ctx.saved_tensors), region.backward.graph.find_nodes(op="placeholder")
    inputs = [
        _with_strides(known[source.number], place.meta["val"].stride()) if source.kind == "gradient" else next(kept)
        for source, place in zip(region.sources, places, strict=True)
    ]
    made = torch.ops.fxshard.region_backward(inputs, region.name, ctx.call)
    found: list[Tensor | None] = [None] * count
    for index, grad in zip(region.trained, made, strict=True):
        found[index] = grad
    for index, given in region.passed.items():
        found[index] = inputs[given]
    return found, None, None


def _implement(op: str, graph_of: Callable[[Region], Any]) -> None:
    """Let `op(values, name, call)` run a graph of the region of that name."""
    ops.LIBRARY.impl(op, lambda values, name, call: list(graph_of(_known(name))(*values)), "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"fxshard::{op}", lambda values, name, call: _like_outputs(graph_of(_known(name)), values[0]), lib=ops.LIBRARY
    )


_implement("region", attrgetter("forward"))
_implement("region_backward", attrgetter("backward"))
torch.library.register_autograd("fxshard::region", _backward, setup_context=_setup_context, lib=ops.LIBRARY)
