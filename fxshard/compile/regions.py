"""Trace the code of a region: once, by itself, with AOTAutograd, the partitioner and what Inductor does before code."""

from __future__ import annotations

import functools
import hashlib
import operator
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

from fxshard import torch_private
from fxshard.errors import FxshardError
from fxshard.ir import graph_edit, launches, ops, regions
from fxshard.ir.regions import Region, Source
from fxshard.options import Options

_OURS: Final = str(Path(__file__).parents[1])


def trace(name: str, text: str, gm: fx.GraphModule, parameters: Sequence[bool], options: Options) -> Region | str:
    """Return the region that calls of `gm` are, or why it can be none; `text` is equal for equal code everywhere."""
    configs = [sorted(each.save_config_portable().items()) for each in (functorch_config, inductor_config)]
    decides = repr((text, torch_private.global_state(), options.lower, sorted(options.inductor.items()), configs))
    name = f"{name}:{hashlib.sha256(decides.encode()).hexdigest()[:12]}"
    try:
        traced = _traced(gm, parameters, options)
    except Exception as error:  # torch's: the same code in line may do, and if not, its error says it better
        *_, innermost = traceback.walk_tb(error.__traceback__)
        if innermost[0].f_code.co_filename.startswith(_OURS) and not isinstance(error, FxshardError):
            raise  # a bug, not a reason
        return f"it could not be traced by itself: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return traced.region(name, len(parameters))


def _traced(gm: fx.GraphModule, parameters: Sequence[bool], options: Options) -> _Traced:
    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = torch_private.mode_of(examples)
    with ExitStack() as stack:
        stack.enter_context(torch_private.tracing_in(mode))
        stack.enter_context(_leaving_floats(mode))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True))
        inputs = [_leaf_like(value, mode) for value in examples]
        traced = _Traced(parameters)
        if options.lower == "eager":
            backend = aot_autograd(
                fw_compiler=traced.keep,
                bw_compiler=lambda gm, inputs: traced.keep(gm, inputs, is_backward=True),
                inference_compiler=traced.keep,
                partition_fn=traced.partition,
            )
            backend(gm, inputs)
        else:
            patches = {**options.inductor, "custom_partitioner_fn": _RegionPartitioner(traced)}
            with inductor_config.patch(force_disable_caches=True):
                compile_fx(gm, inputs, inner_compile=cast(Any, traced.keep), config_patches=patches)
    return traced


@contextmanager
def _leaving_floats(mode: Any) -> Iterator[None]:
    """Leave floats (0-dim float64 tensors, too) to the rest of the capture, which torch would else begin anew."""
    known, shape_env = {*TensorifyState.force_specializations}, mode.shape_env
    symbols = torch_private.sizes_when_traced(shape_env) if shape_env is not None else ()
    TensorifyState.force_specializations.update(map(str, symbols))
    try:
        yield
    finally:
        TensorifyState.force_specializations.intersection_update(known)


def _leaf_like(value: Tensor, mode: Any) -> Tensor:
    with mode:
        leaf = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return leaf.requires_grad_(value.requires_grad)


class _Traced:
    """The graphs that AOTAutograd makes of a region."""

    def __init__(self, parameters: Sequence[bool]) -> None:
        self._parameters = parameters
        self._graphs: dict[str, fx.GraphModule] = {}
        self._metadata: Any = None

    def partition(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Split the joint graph; no view of a parameter is saved, for it would keep the parameter."""
        for node, is_parameter in zip(gm.graph.find_nodes(op="placeholder"), self._parameters, strict=False):
            for view in graph_edit.reshapes_of(node) if is_parameter else ():
                if view is not node:
                    view.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        return min_cut_rematerialization_partition(gm, inputs, **kwargs)

    def keep(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Keep a graph in place of compiling it."""
        self._graphs["backward" if kwargs.get("is_backward") else "forward"] = gm
        self._metadata = TracingContext.get().fw_metadata or self._metadata
        return functools.partial(gm.forward)  # never called

    def region(self, name: str, num_operands: int) -> Region | str:
        """Put together what was kept, or say what stands against it."""
        meta, forward, backward = self._metadata, self._graphs["forward"], self._graphs.get("backward")
        if any(info.mutates_data or info.mutates_metadata for info in meta.input_info) or meta.tokens:
            return "it changes what it reads"
        if any(info.output_type is not OutputType.non_alias for info in meta.output_info):
            return "a result shares memory with another tensor"
        if any(gm.graph.find_nodes(op="get_attr") for gm in self._graphs.values()):
            return "it makes tensors of constants"
        launched = {launch.kind for gm in self._graphs.values() for launch in launches.sequence(gm.graph)}
        if others := sorted(launched - {"all_gather", "reduce_scatter", "all_reduce"}):
            return f"it launches {', '.join(others)}"  # of which Inductor's code of a subgraph gives other values
        operands = [node.name for node in forward.graph.find_nodes(op="placeholder")]
        results = regions.results_of(forward)
        if len(operands) != num_operands or any(not isinstance(r, fx.Node) for r in results):
            return "it takes or gives something that is not a tensor"
        count = len(meta.output_info)
        if not all(regions.is_dense(result.meta["val"]) for result in results[:count]):
            return "a result has gaps in memory"
        if backward is None:
            return regions.remember(Region(name=name, forward=forward, num_results=count))
        differentiable = tuple(i for i, info in enumerate(meta.output_info) if info.requires_grad)
        return _with_backward(name, forward, backward, count, differentiable)


def _with_backward(
    name: str, forward: fx.GraphModule, backward: fx.GraphModule, count: int, differentiable: tuple[int, ...]
) -> Region | str:
    """Put both graphs together; views of what there is anyway are taken again in backward."""
    saved: list[fx.Node] = []
    sources = _sources(forward, backward.graph, count, saved)
    if len([source for source in sources.values() if source.kind == "gradient"]) != len(differentiable):
        return "its backward takes something else than what is saved and gradients of its results"
    forward.graph.output_node().args = ((*regions.results_of(forward)[:count], *saved),)
    if regions.shared_results(forward):
        return "a result shares memory with another tensor"
    merged = _merge_inputs(backward.graph, sources)
    inputs, grads = backward.graph.find_nodes(op="placeholder"), regions.results_of(backward)
    given = {inputs[i]: i for i, source in enumerate(merged) if source.kind == "gradient"}
    passed = {i: given[grad] for i, grad in enumerate(grads) if grad in given}
    trained = tuple(i for i, grad in enumerate(grads) if isinstance(grad, fx.Node) and i not in passed)
    backward.graph.output_node().args = (tuple(grads[i] for i in trained),)
    _copy_shared_results(backward)
    for gm in (forward, backward):
        gm.graph.lint()
        gm.recompile()
    return regions.remember(
        Region(
            name=name,
            forward=forward,
            num_results=count,
            backward=backward,
            differentiable=differentiable,
            sources=merged,
            trained=trained,
            passed=passed,
        )
    )


def _copy_shared_results(gm: fx.GraphModule) -> None:
    """Give memory of its own to what shares it: the gradients of two operands that are added, a view of an input."""
    results = regions.results_of(gm)
    for index in regions.shared_results(gm):
        with gm.graph.inserting_before(gm.graph.output_node()):
            copy = gm.graph.call_function(torch.ops.aten.clone.default, (results[index],))
        value = results[index].meta["val"]
        copy.meta["val"] = value.new_empty_strided(value.shape, value.stride())
        results[index] = copy
    gm.graph.output_node().args = (tuple(results),)


def _sources(forward: fx.GraphModule, backward: fx.Graph, count: int, saved: list[fx.Node]) -> dict[fx.Node, Source]:
    """Find out where backward's inputs come from; fills `saved`. Nothing where their order is not forward's."""
    results = regions.results_of(forward)
    known = {node: Source("operand", i) for i, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    for i, node in enumerate(results[:count]):
        known.setdefault(node, Source("result", i))
    by_name = {node.name: node for node in forward.graph.nodes}
    kept = results[count:]  # in the order of backward's inputs, where no size is among them
    sources: dict[fx.Node, Source] = {}
    for i, place in enumerate(backward.find_nodes(op="placeholder")):
        if i >= len(kept):
            sources[place] = Source("gradient", i - len(kept))
            continue
        if by_name.get(place.name, kept[i]) is not kept[i]:
            return {}
        base, chain = kept[i], []
        while base not in known and _is_view(base):
            chain.append(base)
            (base,) = base.all_input_nodes
        if base not in known:
            known[base] = Source("saved", len(saved))
            saved.append(base)
        sources[place] = known[base]
        if chain:
            _take_again(backward, place, base, chain[::-1])
    return sources


def _is_view(node: fx.Node) -> bool:
    of_list = node.args[0] if node.target is operator.getitem else node
    return isinstance(of_list, fx.Node) and of_list.target in ops.VIEWS | ops.TRANSPOSES


def _take_again(graph: fx.Graph, place: fx.Node, base: fx.Node, chain: Sequence[fx.Node]) -> None:
    """Make an input that was a view of `base` the base itself, and take the view from it."""
    readers = list(place.users)
    place.meta = dict(base.meta)
    last = place
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        for step in chain:
            previous = last
            last = graph.node_copy(step, lambda node, previous=previous: previous)  # type: ignore[misc]
            last.meta = dict(step.meta)
    for reader in readers:
        reader.replace_input_with(place, last)


def _merge_inputs(graph: fx.Graph, sources: dict[fx.Node, Source]) -> tuple[Source, ...]:
    """Make one input of those that are the same tensor."""
    first: dict[Source, fx.Node] = {}
    for place, source in sources.items():
        same = first.setdefault(source, place)
        if same is not place:
            place.replace_all_uses_with(same)
            graph.erase_node(place)
    return tuple(first)


class _RegionPartitioner(CustomPartitionerFn):
    """`_Traced.partition` in the form that Inductor's configuration wants; what it makes is not cached."""

    def __init__(self, traced: _Traced) -> None:
        self._traced = traced

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self._traced.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> None:
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> _RegionPartitioner:
        return self
