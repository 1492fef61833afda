"""The tour and the pages of the passes show what the code produces now; EXPECTTEST_ACCEPT=1 writes them anew."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import inspect

from torch import fx

from fxshard.cost.bucket_sizes import MIB
from fxshard.cost.hardware import BUILTIN
from fxshard.ir import regions
from fxshard.ir.text import graph_text
from fxshard.ir.variant import Variant
from fxshard.passes._base import GraphKind, GraphPass, PassContext
from fxshard.passes.accumulate_gradients import AccumulateGradients
from fxshard.passes.assign_streams import AssignStreams
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.call_regions import CallRegions
from fxshard.passes.cast_shards import CastShards
from fxshard.passes.chain_reductions import ChainReductions
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from fxshard.passes.copy_biases import CopyBiases
from fxshard.passes.copy_in_gradients import CopyInGradients
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.defer_weight_gradients import DeferWeightGradients
from fxshard.passes.enforce_order import EnforceOrder
from fxshard.passes.fold_copies import FoldCopies
from fxshard.passes.fuse_grad_accumulation import FuseGradAccumulation
from fxshard.passes.hand_off_prefetch import HandOffPrefetch
from fxshard.passes.hand_off_reductions import HandOffReductions
from fxshard.passes.hoist_copies import HoistCopies
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.lower_streams import LowerStreams
from fxshard.passes.offload_shards import OffloadShards
from fxshard.passes.outline_regions import OutlineRegions
from fxshard.passes.pin_order import PinOrder
from fxshard.passes.read_resident import ReadResident
from fxshard.passes.reduce_unused import ReduceUnused
from fxshard.passes.reshard_policy import ReshardPolicy
from fxshard.passes.reshard_to_subgroup import ReshardToSubgroup
from fxshard.passes.sink_waits import SinkWaits
from fxshard.passes.tag_parameter_views import TagParameterViews
from tests import graphs
from tests.graphs import SPLIT, Traced, convolution, run_pass, text, without_subgroup_name
from tests.mutation.cases import in_step
from tests.pages import assert_filled, assert_page, code_block, described
from tests.schedules import SCHEDULE, after_passes, model_of

Pairs = list[tuple[str, str]]
"""Title and graph, in the order of the page."""


def graph_block(traced: Traced, kind: GraphKind, after: type[GraphPass] | None = None) -> str:
    gm, _ = traced.at(kind, after=after)
    return code_block(text(gm))


def moves_block(traced: Traced, kind: GraphKind, before: type[GraphPass], after: type[GraphPass]) -> str:
    """The lines that move between two passes, each with its neighbours."""
    first, second = (text(traced.at(kind, after=step)[0]).splitlines() for step in (before, after))
    hunks = list(difflib.unified_diff(first, second, n=1, lineterm=""))[2:]  # without the names of files
    return code_block("\n".join("..." if line.startswith("@@") else line for line in hunks), "diff")


def last_graph(traced: Traced) -> str:
    """The forward graph at the end of the codegen stage, as Inductor gets it."""
    gm = fx.GraphModule({}, copy.deepcopy(traced.history.last("forward_codegen").graph))
    run_pass(EnforceOrder(), gm, PassContext(plan=traced.plan, kind="forward"))
    return text(gm)


def model_block() -> str:
    sources = (inspect.getsource(model) for model in (graphs.Layer, graphs.TwoLayers))
    return code_block("\n\n".join(sources), "python")


def test_shows_in_the_tour_what_each_pass_does_now() -> None:
    traced = graphs.two_layers()
    blocks = {
        "model": model_block(),
        "graph: dynamo": code_block(str(traced.history.last("dynamo"))),
        "graph: joint after ReshardPolicy": graph_block(traced, "joint", ReshardPolicy),
        "graph: forward": graph_block(traced, "forward"),
        "graph: backward": graph_block(traced, "backward"),
        "graph: forward after InsertCollectives": graph_block(traced, "forward", InsertCollectives),
        "graph: backward after InsertCollectives": graph_block(traced, "backward", InsertCollectives),
        "moves: backward by SinkWaits": moves_block(traced, "backward", CoalesceCollectives, SinkWaits),
        "moves: forward by HoistPrefetch": moves_block(traced, "forward", CoalesceCollectives, HoistPrefetch),
        "graph: forward after EnforceOrder": code_block(last_graph(traced)),
    }
    assert_filled("docs/tour.md", blocks)


def test_is_right_to_say_in_the_tour_that_dedup_changes_nothing() -> None:
    traced = graphs.two_layers()
    assert graph_block(traced, "joint") == graph_block(traced, "joint", DedupUnshard)


def test_is_right_to_say_in_the_tour_that_buckets_and_tensors_stay_as_they_are() -> None:
    traced = graphs.two_layers()
    for kind in SPLIT:
        assert graph_block(traced, kind, InsertCollectives) == graph_block(traced, kind, CoalesceCollectives)


RESIDUAL = "Three layers, `tanh(x @ weight + bias) + x`; what the first reads needs no gradient, so it is another."


def page_of(pass_: type[GraphPass], example: str, pairs: Pairs) -> str:
    """The page of a pass: its module's summary, its docstring, and an example graph before and after."""
    module = importlib.import_module(pass_.__module__)
    summary = (module.__doc__ or "").strip()
    name = pass_.__module__.rpartition(".")[2]
    graph_texts = "\n\n".join(f"{title}:\n\n{block}" for title, block in pairs)
    return f"""\
# {pass_.__name__}

{summary}

{described(pass_)}

Code: [`passes/{name}.py`](../../passes/{name}.py). Tests: \
[`tests/passes/test_{name}.py`](../../tests/passes/test_{name}.py).

## Example

{example}

{graph_texts}

This page is written by `tests/test_tour.py` from the pass and its graphs.
"""


def before_and_after(traced: Traced, kind: GraphKind, before: type[GraphPass] | None, after: type[GraphPass]) -> Pairs:
    return [
        (f"The {kind} graph before", graph_block(traced, kind, before)),
        (f"The {kind} graph after", graph_block(traced, kind, after)),
    ]


def test_keeps_the_page_of_outline_regions_in_step() -> None:
    results = graphs.regions().history.stages["dynamo"]
    pairs = [
        ("Dynamo's graph before", code_block(str(results["captured"]))),
        ("Dynamo's graph after", code_block(str(results["outline_regions"]))),
    ]
    assert_page("docs/passes/outline_regions.md", page_of(OutlineRegions, RESIDUAL, pairs))


def test_keeps_the_page_of_call_regions_in_step() -> None:
    results = graphs.regions().history.stages["forward"]
    called = results["call_regions"]
    (name,) = {str(node.target) for node in called.graph.find_nodes(op="get_attr")}
    pairs = [
        ("The forward graph before", code_block(str(results["captured"]))),
        ("The forward graph after", code_block(str(called))),
        ("What is called", code_block(graph_text(called.graph.owning_module.get_submodule(name).graph))),  # type: ignore[union-attr, arg-type]
    ]
    assert_page("docs/passes/call_regions.md", page_of(CallRegions, RESIDUAL, pairs))


def test_keeps_the_page_of_fold_copies_in_step() -> None:
    pairs: Pairs = []
    for kind in SPLIT:
        gm, ctx = graphs.regions().at(kind, after=InsertCollectives)
        pairs.append((f"The {kind} graph before", code_block(text(gm))))
        run_pass(FoldCopies(), gm, ctx)
        pairs.append((f"The {kind} graph after", code_block(text(gm))))
        call = gm.graph.find_nodes(op="call_function", target=regions.INVOKE)[0]
        pairs.append(("What it calls", code_block(graph_text(regions.code_of(call).graph))))  # type: ignore[union-attr]
    assert_page("docs/passes/fold_copies.md", page_of(FoldCopies, RESIDUAL, pairs))


def test_keeps_the_page_of_dedup_unshard_in_step() -> None:
    pairs = before_and_after(graphs.read_twice(), "joint", None, DedupUnshard)
    example = "A module that reads its only weight twice in one call: `(x @ weight) @ weight`."
    assert_page("docs/passes/dedup_unshard.md", page_of(DedupUnshard, example, pairs))


def test_keeps_the_page_of_reshard_policy_in_step() -> None:
    traced = graphs.casting(reshard_after_forward=True)
    pairs = before_and_after(traced, "joint", DedupUnshard, ReshardPolicy)
    example = (
        "A module that computes in bfloat16 with a cast and transposed weight, under `reshard_after_forward=True`."
    )
    assert_page("docs/passes/reshard_policy.md", page_of(ReshardPolicy, example, pairs))


def test_keeps_the_page_of_reshard_to_subgroup_in_step() -> None:
    traced = graphs.in_subgroups()
    pairs = [
        *before_and_after(traced, "joint", DedupUnshard, ReshardToSubgroup),
        *before_and_after(traced, "forward", None, ReshardToSubgroup),
        ("The backward graph, once collectives are inserted", graph_block(traced, "backward", InsertCollectives)),
    ]
    example = "Two layers on four ranks, with `reshard_after_forward=2`."
    page = page_of(ReshardToSubgroup, example, [(title, without_subgroup_name(block)) for title, block in pairs])
    assert_page("docs/passes/reshard_to_subgroup.md", page)


def test_keeps_the_page_of_reduce_unused_in_step() -> None:
    traced = in_step()
    pairs = [
        *before_and_after(traced, "joint", DedupUnshard, ReduceUnused),
        ("The backward graph, once collectives are inserted", graph_block(traced, "backward", InsertCollectives)),
    ]
    example = "A unit of three vectors on two ranks, of which this graph does not use the second one."
    assert_page("docs/passes/reduce_unused.md", page_of(ReduceUnused, example, pairs))


def test_keeps_the_page_of_accumulate_gradients_in_step() -> None:
    traced = graphs.trace(graphs.Layer(), reshard_after_forward=True)
    pairs = [("The backward graph before", graph_block(traced, "backward", DedupUnshard))]
    for which in (Variant(accumulates=frozenset({""})), Variant(finishes=frozenset({""}))):
        gm, ctx = traced.at("backward", after=DedupUnshard)
        run_pass(AccumulateGradients(which=which), gm, ctx)
        pairs.append((f"The {which.name([''])} backward", code_block(text(gm))))
    example = "One layer, `x @ weight + bias`, on two ranks."
    assert_page("docs/passes/accumulate_gradients.md", page_of(AccumulateGradients, example, pairs))


def test_keeps_the_page_of_fuse_grad_accumulation_in_step() -> None:
    traced = graphs.trace(graphs.Layer(), reshard_after_forward=True)
    gm, ctx = traced.at("backward", after=DedupUnshard)
    run_pass(AccumulateGradients(which=Variant(accumulates=frozenset({""}))), gm, ctx)
    pairs = [("The accumulate backward before", code_block(text(gm)))]
    run_pass(FuseGradAccumulation(), gm, ctx)
    pairs.append(("The accumulate backward after", code_block(text(gm))))
    example = "One layer, `x @ weight + bias`, on two ranks."
    assert_page("docs/passes/fuse_grad_accumulation.md", page_of(FuseGradAccumulation, example, pairs))


def test_keeps_the_page_of_read_resident_in_step() -> None:
    traced = graphs.trace(graphs.Layer(), reshard_after_forward=True)
    pairs = [("The forward graph before", graph_block(traced, "forward", DedupUnshard))]
    gm, ctx = traced.at("forward", after=DedupUnshard)
    run_pass(ReadResident(which=Variant(resident=frozenset({""}))), gm, ctx)
    pairs.append(("The resident forward", code_block(text(gm))))
    example = "One layer, `x @ weight + bias`, on two ranks."
    assert_page("docs/passes/read_resident.md", page_of(ReadResident, example, pairs))


def test_keeps_the_page_of_insert_collectives_in_step() -> None:
    traced = graphs.trace(graphs.Layer(), reshard_after_forward=True)
    pairs = [
        *before_and_after(traced, "forward", DedupUnshard, InsertCollectives),
        *before_and_after(traced, "backward", DedupUnshard, InsertCollectives),
    ]
    example = "One layer, `x @ weight + bias`, on two ranks."
    assert_page("docs/passes/insert_collectives.md", page_of(InsertCollectives, example, pairs))


def rewritten(traced: Traced, kind: GraphKind, pass_: GraphPass, *earlier: GraphPass) -> Pairs:
    """A graph before and after a pass to which even these few bytes matter, `earlier` ones having run."""
    gm, ctx = traced.at(kind, after=InsertCollectives)
    link = dataclasses.replace(ctx.hardware, gather_tensor_overhead=1e-9, reduce_tensor_overhead=1e-9)
    ctx = dataclasses.replace(ctx, hardware=link)
    for step in earlier:
        step.apply(gm, ctx)
    before = code_block(text(gm))
    pass_.apply(gm, ctx)
    return [(f"The {kind} graph before", before), (f"The {kind} graph after", code_block(text(gm)))]


def test_keeps_the_page_of_bucket_collectives_in_step() -> None:
    layers = 160 / MIB
    traced = graphs.two_layers(reshard_after_forward=False)
    pairs = [pair for kind in SPLIT for pair in rewritten(traced, kind, BucketCollectives(size=layers))]
    example = "Two layers, `x @ weight + bias`, on two ranks, in buckets of 160 bytes."
    assert_page("docs/passes/bucket_collectives.md", page_of(BucketCollectives, example, pairs))


def test_keeps_the_page_of_coalesce_collectives_in_step() -> None:
    traced = graphs.trace(graphs.Layer(), reshard_after_forward=True)
    pairs = [pair for kind in SPLIT for pair in rewritten(traced, kind, CoalesceCollectives())]
    example = "One layer, `x @ weight + bias`, on two ranks; the link is made up so that every copy is dear."
    assert_page("docs/passes/coalesce_collectives.md", page_of(CoalesceCollectives, example, pairs))


def test_keeps_the_page_of_hoist_prefetch_in_step() -> None:
    traced = graphs.two_layers(reshard_after_forward=True)
    pairs = rewritten(traced, "forward", HoistPrefetch(depth=1))
    example = "Two layers, `x @ weight + bias`, on two ranks, one unit ahead."
    assert_page("docs/passes/hoist_prefetch.md", page_of(HoistPrefetch, example, pairs))


def test_keeps_the_page_of_offload_shards_in_step() -> None:
    traced = graphs.trace(graphs.Layer(), reshard_after_forward=True, offloads=True)
    pairs: Pairs = []
    for kind in SPLIT:
        pairs += before_and_after(traced, kind, DedupUnshard, OffloadShards)
        pairs.append((f"The {kind} graph, once collectives are inserted", graph_block(traced, kind, InsertCollectives)))
    example = "One layer, `x @ weight + bias`, on two ranks, with `offload_policy=CPUOffloadPolicy()`."
    assert_page("docs/passes/offload_shards.md", page_of(OffloadShards, example, pairs))


def test_keeps_the_page_of_hoist_copies_in_step() -> None:
    traced = graphs.offloaded(reshard_after_forward=True)
    pairs = rewritten(traced, "forward", HoistCopies(), HoistPrefetch(depth=1))
    example = (
        "Two layers, `x @ weight + bias`, on two ranks, with `offload_policy=CPUOffloadPolicy()`; `HoistPrefetch` has "
        "run."
    )
    assert_page("docs/passes/hoist_copies.md", page_of(HoistCopies, example, pairs))


def test_keeps_the_page_of_sink_waits_in_step() -> None:
    traced = graphs.two_layers(reshard_after_forward=True)
    pairs = rewritten(traced, "backward", SinkWaits(max_buffers=2))
    example = "Two layers, `x @ weight + bias`, on two ranks, with two reductions in flight."
    assert_page("docs/passes/sink_waits.md", page_of(SinkWaits, example, pairs))


def test_keeps_the_page_of_chain_reductions_in_step() -> None:
    traced = model_of("two_layers", replicas=2)
    slow = dataclasses.replace(BUILTIN["h100"], kernel_overhead=1e-3, link_latency=0.5e-3)
    before, _ = after_passes(traced, "backward", *SCHEDULE, hardware=slow)
    after, _ = after_passes(traced, "backward", *SCHEDULE, ChainReductions(), hardware=slow)
    pairs = [
        ("The backward graph before", code_block(text(before))),
        ("The backward graph after", code_block(text(after))),
    ]
    example = (
        "Two layers, `x @ weight + bias`, two replicas of two ranks each; `SinkWaits` and `HoistPrefetch` have run. A "
        "reduction takes half as long as a kernel."
    )
    assert_page("docs/passes/chain_reductions.md", page_of(ChainReductions, example, pairs))


def test_keeps_the_page_of_defer_weight_gradients_in_step() -> None:
    gm, ctx = model_of("root").at("backward", after=InsertCollectives)
    slow = dataclasses.replace(ctx.hardware, kernel_overhead=250e-6, link_latency=0.0, link_bandwidth=64e3)
    before = code_block(text(gm))
    run_pass(DeferWeightGradients(), gm, dataclasses.replace(ctx, hardware=slow))
    pairs = [("The backward graph before", before), ("The backward graph after", code_block(text(gm)))]
    example = "Three layers between two matrices of the root, on two ranks, and a link that is slow beside the kernels."
    assert_page("docs/passes/defer_weight_gradients.md", page_of(DeferWeightGradients, example, pairs))


def test_keeps_the_page_of_pin_order_in_step() -> None:
    traced = graphs.two_layers(reshard_after_forward=True)
    earlier = (SinkWaits(max_buffers=2), HoistPrefetch(depth=1))
    pairs = [pair for kind in SPLIT for pair in rewritten(traced, kind, PinOrder(), *earlier)]
    example = "Two layers, `x @ weight + bias`, on two ranks; `SinkWaits` and `HoistPrefetch` have run."
    assert_page("docs/passes/pin_order.md", page_of(PinOrder, example, pairs))


def test_keeps_the_page_of_tag_parameter_views_in_step() -> None:
    traced = graphs.two_layers(reshard_after_forward=False)
    pairs = before_and_after(traced, "joint", ReshardPolicy, TagParameterViews)
    example = "Two layers, `x @ weight + bias`, whose parameters are kept for backward."
    assert_page("docs/passes/tag_parameter_views.md", page_of(TagParameterViews, example, pairs))


def test_keeps_the_page_of_hand_off_prefetch_in_step() -> None:
    traced = graphs.two_layers(reshard_after_forward=True)
    pairs = [pair for kind in SPLIT for pair in rewritten(traced, kind, HandOffPrefetch(), HoistPrefetch(depth=1))]
    example = "Two layers, `x @ weight + bias`, on two ranks; `HoistPrefetch` has run."
    assert_page("docs/passes/hand_off_prefetch.md", page_of(HandOffPrefetch, example, pairs))


def test_keeps_the_page_of_hand_off_reductions_in_step() -> None:
    traced = graphs.two_layers(reshard_after_forward=True)
    plan = dataclasses.replace(traced.plan, is_part=True)
    traced = dataclasses.replace(traced, plan=plan)
    pairs = rewritten(traced, "backward", HandOffReductions(), SinkWaits())
    example = "Two layers, `x @ weight + bias`, on two ranks, of a model with more units; `SinkWaits` has run."
    assert_page("docs/passes/hand_off_reductions.md", page_of(HandOffReductions, example, pairs))


def test_keeps_the_page_of_lower_streams_in_step() -> None:
    traced = graphs.mixed_precision(reshard_after_forward=True)
    pairs = [pair for kind in SPLIT for pair in rewritten(traced, kind, LowerStreams(), AssignStreams(mode="side"))]
    example = (
        "One layer, `x @ weight + bias`, on two ranks, gathered in bfloat16 and reduced in float32; `AssignStreams` "
        "has run with the mode `side`."
    )
    assert_page("docs/passes/lower_streams.md", page_of(LowerStreams, example, pairs))


def test_keeps_the_page_of_cast_shards_in_step() -> None:
    pairs = rewritten(model_of("mixed_precision"), "forward", CastShards(devices=("cpu",)), CoalesceCollectives())
    example = "Three layers that are gathered in bfloat16, tensor by tensor; the pass is told that a CPU wants it."
    assert_page("docs/passes/cast_shards.md", page_of(CastShards, example, pairs))


def test_keeps_the_page_of_copy_in_gradients_in_step() -> None:
    pairs = rewritten(model_of("mixed_precision"), "backward", CopyInGradients(devices=("cpu",)))
    example = "Three layers that are gathered in bfloat16 and reduced in float32; the pass is told that a CPU wants it."
    assert_page("docs/passes/copy_in_gradients.md", page_of(CopyInGradients, example, pairs))


def test_keeps_the_page_of_copy_biases_in_step() -> None:
    pairs = rewritten(convolution(), "forward", CopyBiases(needed=True))
    example = "A convolution, on two ranks."
    assert_page("docs/passes/copy_biases.md", page_of(CopyBiases, example, pairs))


def test_keeps_the_page_of_enforce_order_in_step() -> None:
    traced = graphs.two_layers(reshard_after_forward=True)
    earlier = (SinkWaits(max_buffers=2), HoistPrefetch(depth=1), PinOrder())
    pairs = [pair for kind in SPLIT for pair in rewritten(traced, kind, EnforceOrder(), *earlier)]
    example = "Two layers, `x @ weight + bias`, on two ranks; `SinkWaits`, `HoistPrefetch` and `PinOrder` have run."
    assert_page("docs/passes/enforce_order.md", page_of(EnforceOrder, example, pairs))


def test_keeps_the_page_of_assign_streams_in_step() -> None:
    traced = graphs.mixed_precision(reshard_after_forward=True)
    pairs = []
    for kind in SPLIT:
        gm, ctx = traced.at(kind, after=InsertCollectives)
        pairs.append((f"The {kind} graph before", code_block(text(gm))))
        AssignStreams(mode="side").apply(gm, ctx)
        pairs.append((f"The {kind} graph after", code_block(text(gm))))
    example = (
        "One layer, `x @ weight + bias`, on two ranks, gathered in bfloat16 and reduced in float32; the mode is `side`."
    )
    assert_page("docs/passes/assign_streams.md", page_of(AssignStreams, example, pairs))
