"""The tour and the pages of the passes show what the code produces now; EXPECTTEST_ACCEPT=1 writes them anew."""

import copy
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from torch import fx

from fxshard.cost.bucket_sizes import MIB
from fxshard.hardware import BUILTIN
from fxshard.ir import regions
from fxshard.ir.text import graph_text
from fxshard.ir.variant import Variant
from fxshard.passes._base import GraphKind, GraphPass, PassContext
from fxshard.passes.accumulate_gradients import AccumulateGradients
from fxshard.passes.assign_streams import AssignStreams
from fxshard.passes.bind_markers import BindMarkers
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
from fxshard.passes.keep_last_unit import KeepLastUnit
from fxshard.passes.lower_streams import LowerStreams
from fxshard.passes.offload_shards import OffloadShards
from fxshard.passes.outline_regions import OutlineRegions
from fxshard.passes.pin_order import PinOrder
from fxshard.passes.read_resident import ReadResident
from fxshard.passes.reduce_unused import ReduceUnused
from fxshard.passes.refuse_writes import RefuseWrites
from fxshard.passes.reshard_policy import ReshardPolicy
from fxshard.passes.reshard_to_subgroup import ReshardToSubgroup
from fxshard.passes.sink_waits import SinkWaits
from fxshard.passes.tag_parameter_views import TagParameterViews
from tests import graphs
from tests.graphs import SPLIT, Traced, convolution, run_pass, text, without_subgroup_name
from tests.mutation.cases import in_step
from tests.pages import ROOT, assert_filled, changes, code_block
from tests.schedules import SCHEDULE, after_passes, model_of


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


def assert_shows(pass_: type[GraphPass], blocks: Mapping[str, str]) -> None:
    """The page of a pass shows these changes, and names its options, its code and its tests."""
    name = pass_.__module__.rpartition(".")[2]
    path = f"docs/passes/{name}.md"
    assert_filled(path, {f"graph: {title}": block for title, block in blocks.items()})
    page = (ROOT / path).read_text()
    options = [f"`{field.name}`" for field in dataclasses.fields(pass_)]
    wanted = [f"# {pass_.__name__}\n", *options, f"](../../passes/{name}.py)", f"](../../tests/passes/test_{name}.py)"]
    assert not [text for text in wanted if text not in page]


def between(traced: Traced, kind: GraphKind, before: type[GraphPass] | None, after: type[GraphPass]) -> dict[str, str]:
    """What changed in a graph from one pass to another."""
    graphs_of = (traced.at(kind, after=pass_)[0] for pass_ in (before, after))
    return {kind: changes(*map(text, graphs_of))}


def layer(**kwargs: Any) -> Traced:
    return graphs.trace(graphs.Layer(), reshard_after_forward=True, **kwargs)


def layers() -> Traced:
    return graphs.two_layers(reshard_after_forward=True)


def mixed() -> Traced:
    return graphs.mixed_precision(reshard_after_forward=True)


@pytest.mark.parametrize(
    ("build", "kinds", "before", "pass_"),
    [
        (graphs.read_twice, ["joint"], None, DedupUnshard),
        (lambda: graphs.casting(reshard_after_forward=True), ["joint"], DedupUnshard, ReshardPolicy),
        (lambda: graphs.two_layers(reshard_after_forward=False), ["joint"], ReshardPolicy, TagParameterViews),
        (in_step, ["joint"], DedupUnshard, ReduceUnused),
        (layer, SPLIT, DedupUnshard, InsertCollectives),
        (lambda: layer(offloads=True), SPLIT, DedupUnshard, OffloadShards),
    ],
)
def test_keeps_the_page_of_a_pass_in_step_with_the_pipeline(
    build: Callable[[], Traced], kinds: Sequence[GraphKind], before: type[GraphPass] | None, pass_: type[GraphPass]
) -> None:
    traced = build()
    assert_shows(pass_, {kind: between(traced, kind, before, pass_)[kind] for kind in kinds})


def rewritten(traced: Traced, kind: GraphKind, pass_: GraphPass, *earlier: GraphPass) -> str:
    """What a pass to which even these few bytes matter changes in a graph, `earlier` ones having run."""
    gm, ctx = traced.at(kind, after=InsertCollectives)
    link = dataclasses.replace(ctx.hardware, gather_tensor_overhead=1e-9, reduce_tensor_overhead=1e-9)
    ctx = dataclasses.replace(ctx, hardware=link)
    for step in earlier:
        step.apply(gm, ctx)
    before = text(gm)
    pass_.apply(gm, ctx)
    return changes(before, text(gm))


ONE_AHEAD, TWO_BUFFERS, ON_SIDE = HoistPrefetch(depth=1), SinkWaits(max_buffers=2), AssignStreams(mode="side")


@pytest.mark.parametrize(
    ("build", "kinds", "passes"),
    [
        (lambda: graphs.two_layers(reshard_after_forward=False), ["backward"], [BucketCollectives(size=160 / MIB)]),
        (layer, ["forward"], [CoalesceCollectives()]),
        (layers, ["forward"], [ONE_AHEAD]),
        (lambda: graphs.offloaded(reshard_after_forward=True), ["forward"], [ONE_AHEAD, HoistCopies()]),
        (layers, ["backward"], [TWO_BUFFERS]),
        (layers, ["backward"], [TWO_BUFFERS, ONE_AHEAD, PinOrder()]),
        (layers, ["forward"], [TWO_BUFFERS, ONE_AHEAD, PinOrder(), EnforceOrder()]),
        (layers, ["forward"], [ONE_AHEAD, HandOffPrefetch()]),
        (mixed, SPLIT, [ON_SIDE]),
        (mixed, SPLIT, [ON_SIDE, LowerStreams()]),
        (mixed, ["forward"], [CoalesceCollectives(), CastShards(devices=("cpu",))]),
        (mixed, ["backward"], [CopyInGradients(devices=("cpu",))]),
        (convolution, ["forward"], [CopyBiases(needed=True)]),
    ],
)
def test_keeps_the_page_of_the_last_of_these_passes_in_step(
    build: Callable[[], Traced], kinds: Sequence[GraphKind], passes: Sequence[GraphPass]
) -> None:
    traced, (*earlier, pass_) = build(), passes
    assert_shows(type(pass_), {kind: rewritten(traced, kind, pass_, *earlier) for kind in kinds})


def test_keeps_the_pages_of_the_dynamo_stage_in_step() -> None:
    results = graphs.regions().history.stages["dynamo"]
    change = changes(str(results["bind_markers"]), str(results["outline_regions"]))
    assert_shows(OutlineRegions, {"dynamo": change})
    assert_shows(BindMarkers, {})
    assert_shows(KeepLastUnit, {})
    assert_shows(RefuseWrites, {})


def test_keeps_the_page_of_call_regions_in_step() -> None:
    results = graphs.regions().history.stages["forward"]
    change = changes(str(results["captured"]), str(results["call_regions"]))
    assert_shows(CallRegions, {"forward": change})


def test_keeps_the_page_of_fold_copies_in_step() -> None:
    gm, ctx = graphs.regions().at("forward", after=InsertCollectives)
    before = text(gm)
    run_pass(FoldCopies(), gm, ctx)
    call = gm.graph.find_nodes(op="call_function", target=regions.INVOKE)[0]
    code = code_block(graph_text(regions.code_of(call).graph))  # type: ignore[union-attr]
    assert_shows(FoldCopies, {"forward": changes(before, text(gm)), "what it calls": code})


def test_keeps_the_page_of_reshard_to_subgroup_in_step() -> None:
    traced = graphs.trace(graphs.Layer(), world_size=4, reshard_after_forward=2)
    change = between(traced, "joint", DedupUnshard, ReshardToSubgroup)
    assert_shows(ReshardToSubgroup, {kind: without_subgroup_name(block) for kind, block in change.items()})


def test_keeps_the_page_of_accumulate_gradients_in_step() -> None:
    traced = layer()
    blocks = {}
    for which in (Variant(accumulates=frozenset({""})), Variant(finishes=frozenset({""}))):
        gm, ctx = traced.at("backward", after=DedupUnshard)
        before = text(gm)
        run_pass(AccumulateGradients(which=which), gm, ctx)
        blocks[which.name([""])] = changes(before, text(gm))
    assert_shows(AccumulateGradients, blocks)


def test_keeps_the_page_of_fuse_grad_accumulation_in_step() -> None:
    gm, ctx = layer().at("backward", after=DedupUnshard)
    run_pass(AccumulateGradients(which=Variant(accumulates=frozenset({""}))), gm, ctx)
    before = text(gm)
    run_pass(FuseGradAccumulation(), gm, ctx)
    assert_shows(FuseGradAccumulation, {"accumulate": changes(before, text(gm))})


def test_keeps_the_page_of_read_resident_in_step() -> None:
    gm, ctx = layer().at("forward", after=DedupUnshard)
    before = text(gm)
    run_pass(ReadResident(which=Variant(resident=frozenset({""}))), gm, ctx)
    assert_shows(ReadResident, {"forward": changes(before, text(gm))})


def test_keeps_the_page_of_chain_reductions_in_step() -> None:
    traced = model_of("two_layers", replicas=2)
    slow = dataclasses.replace(BUILTIN["h100"], kernel_overhead=1e-3, link_latency=0.5e-3)
    before, _ = after_passes(traced, "backward", *SCHEDULE, hardware=slow)
    after, _ = after_passes(traced, "backward", *SCHEDULE, ChainReductions(), hardware=slow)
    assert_shows(ChainReductions, {"backward": changes(text(before), text(after))})


def test_keeps_the_page_of_defer_weight_gradients_in_step() -> None:
    gm, ctx = model_of("root").at("backward", after=InsertCollectives)
    slow = dataclasses.replace(ctx.hardware, kernel_overhead=250e-6, link_latency=0.0, link_bandwidth=64e3)
    before = text(gm)
    run_pass(DeferWeightGradients(), gm, dataclasses.replace(ctx, hardware=slow))
    assert_shows(DeferWeightGradients, {"backward": changes(before, text(gm))})


def test_keeps_the_page_of_hand_off_reductions_in_step() -> None:
    traced = layers()
    traced = dataclasses.replace(traced, plan=dataclasses.replace(traced.plan, is_part=True))
    change = rewritten(traced, "backward", HandOffReductions(), SinkWaits())
    assert_shows(HandOffReductions, {"backward": change})
