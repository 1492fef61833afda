"""The compiled schedule beside others and beside its lower bound, and why each launch stands where it stands."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard import ConfigError, MixedPrecisionPolicy, explain, explanation_of
from fxshard.cost.sizes import sizes_of
from fxshard.cost.step import GraphOfStep, step_time
from fxshard.cost.timeline import Timeline
from fxshard.hardware import BUILTIN, HardwareSpec
from fxshard.inspect.explanation import FrameExplanation
from fxshard.inspect.schedules import OTHERS, Schedule, least_seconds
from fxshard.ir import launch_groups
from fxshard.ir.collectives import GATHERS, REDUCTIONS
from fxshard.ir.history import Snapshot
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.tools.demo.gpt import GPT
from tests import graphs
from tests.graphs import Traced, TwoLayers
from tests.inspect.models import EAGER, Broken, X, compiled_by_us, explained, shard
from tests.pairwise import slow
from tests.schedules import four_layers

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

IDEAL = dataclasses.replace(
    BUILTIN["h100"],
    peak_flops={"f32": 1e30},
    memory_bandwidth=1e30,
    link_bandwidth=1e30,
    link_latency=0.0,
    kernel_overhead=1.0,
)
"""Every kernel takes a second, every launch its latency."""

HARDWARE = {
    **BUILTIN,
    "slow link": dataclasses.replace(BUILTIN["h100"], link_bandwidth=1e9),
    "fast link": dataclasses.replace(BUILTIN["h100"], link_bandwidth=1e13, link_latency=1e-6),
    "latency only": dataclasses.replace(BUILTIN["h100"], link_bandwidth=1e30, link_latency=1e-3),
}


COPIES = graphs.HARDWARE.to_json()

ONE_LAYER = 160 / 2**30
"""GiB of one of the layers' gathered buffer and the copies out of it."""


def deep(**kwargs: Any) -> Traced:
    """The GPT of the demo, narrow: six blocks and the root."""
    model = GPT(max_seq_len=16, dim=32, num_layers=6, num_heads=2)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    return graphs.trace(model, units=lambda m: [*m.get_submodule("blocks").children(), m], inputs=[tokens], **kwargs)


MODELS: dict[str, Callable[..., Traced]] = {
    **{model.__name__: model for model in graphs.EVERY_UNIT},
    "four_layers": four_layers,
    "deep": deep,
    "deep, inductor": functools.partial(deep, lowering="inductor"),
    "deep, kept": functools.partial(deep, reshard_after_forward=False),
    "deep, mixed precision": functools.partial(deep, mp_policy=BF16, lowering="inductor"),
}
model_of = functools.cache(lambda name: MODELS[name]())


def frame_of(model: Traced, hardware: HardwareSpec, budget: int | None = None) -> FrameExplanation:
    return FrameExplanation(plan=model.plan, history=model.history, hardware=hardware, unsharded_budget_bytes=budget)


def by_name(frame: FrameExplanation, stage: str) -> dict[str, Schedule]:
    return {found.name: found for found in frame.schedules(stage)}


# ---- the lower bound


@pytest.mark.parametrize(
    ("stage", "latency", "seconds"),
    [
        # 4 kernels after each of two gathers.
        ("forward", 1, 1 + 8),  # the first gather, then compute
        ("forward", 3, 3 + 8),
        ("forward", 10, 2 * 10 + 4),  # both gathers, then what is behind the second
        # 3 kernels, a reduction, 5 kernels that wait for a gather, a reduction.
        ("backward", 1, 8 + 1),  # compute, then the last reduction
        ("backward", 5, 5 + 5 + 5),  # a gather, the kernels behind it, the last reduction
        ("backward", 10, 3 * 10),  # the link is never idle
    ],
)
def test_the_bound_is_the_longest_way_through_compute_and_link(stage: str, latency: float, seconds: float) -> None:
    frame = frame_of(model_of("two_layers"), dataclasses.replace(IDEAL, link_latency=latency))
    assert frame.lower_bound(stage) == pytest.approx(seconds)
    assert by_name(frame, stage)["1 ahead"].seconds == pytest.approx(seconds)  # and it can be reached


def test_gathers_of_different_groups_do_not_stand_in_line() -> None:
    model = model_of("two_layers")
    graph = Snapshot(model.history.last("forward").graph).copy()
    hardware = dataclasses.replace(IDEAL, link_latency=10)
    assert least_seconds(graph, model.plan, hardware) == pytest.approx(10 + 10 + 4)
    (_, second) = graph.find_nodes(op="call_function", target=GATHERS[0])
    second.args = (*second.args[:2], "another group")
    assert least_seconds(graph, model.plan, hardware) == pytest.approx(10 + 8)


def every_schedule(graph: fx.Graph) -> Iterator[dict[fx.Node, fx.Node]]:
    """Everywhere that gathers can be launched and reductions be waited for, in every order."""
    nodes = list(graph.nodes)
    first = len(graph.find_nodes(op="placeholder"))
    places = {
        launch: nodes[first : nodes.index(launch) + 1]
        for group in launch_groups.groups_of(graph, GATHERS)
        for launch in group.launches
    }
    places |= {wait: nodes[nodes.index(wait) :] for f in launch_groups.groups_of(graph, REDUCTIONS) for wait in f.waits}
    for order in itertools.permutations(places):
        for chosen in itertools.product(*(places[node] for node in order)):
            yield dict(zip(order, chosen, strict=True))


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("latency", [1, 4, 10])
@pytest.mark.parametrize("model", ["two_layers", "called_twice"])
def test_no_schedule_at_all_beats_the_bound(model: str, latency: float, stage: str) -> None:
    traced, hardware = model_of(model), dataclasses.replace(IDEAL, link_latency=latency)
    graph = traced.history.stages[stage]["coalesce_collectives"].graph
    timeline = Timeline(sizes_of(graph, traced.plan), hardware)
    compute = sum(timeline.seconds[node] for node in timeline.compute)
    found = [
        compute + sum(t.exposed for t in timeline.run(moved).transfers.values()) for moved in every_schedule(graph)
    ]
    assert len(set(found)) > (latency > 1)
    assert min(found) >= least_seconds(graph, traced.plan, hardware) - 1e-9


@pytest.mark.parametrize("stage", [slow("forward"), "backward"])
@pytest.mark.parametrize("model", [slow(name) if name.startswith("deep") else name for name in MODELS])
def test_the_bound_does_not_depend_on_the_schedule_that_it_is_read_from(model: str, stage: str) -> None:
    traced = model_of(model)
    records = traced.history.stages[stage]
    bounds = {
        least_seconds(records[name].graph, traced.plan, HARDWARE["slow link"])
        for name in ("coalesce_collectives", "sink_waits", "hoist_prefetch")
    }
    assert max(bounds) == pytest.approx(min(bounds))


def scale(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


SOME_HARDWARE = st.builds(
    lambda flops, memory, link, latency, overhead: dataclasses.replace(
        BUILTIN["h100"],
        peak_flops={"f32": flops, "bf16": flops},
        memory_bandwidth=memory,
        link_bandwidth=link,
        link_latency=latency,
        kernel_overhead=overhead,
    ),
    flops=scale(9, 14),
    memory=scale(8, 12),
    link=scale(6, 13),
    latency=st.just(0.0) | scale(-7, -3),
    overhead=st.just(0.0) | scale(-7, -4),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(model=st.sampled_from(list(MODELS)), hardware=st.sampled_from(list(HARDWARE.values())) | SOME_HARDWARE)
def test_no_schedule_shown_is_faster_than_the_bound(model: str, hardware: HardwareSpec) -> None:
    frame = frame_of(model_of(model), hardware)
    assert frame.scheduled == ["forward", "backward"]
    for stage in frame.scheduled:
        least = frame.lower_bound(stage) - 1e-9
        assert [found for found in frame.schedules(stage) if found.seconds < least] == []


# ---- the schedules


@pytest.mark.parametrize("streams", ["nccl", "side"])
def test_a_schedule_takes_as_long_as_on_the_clock_of_steps(streams: str) -> None:
    (frame,) = explained(TwoLayers, 8, streams=streams, param_dtype=torch.bfloat16, hardware="h100").frames
    for stage in frame.scheduled:
        timeline = Timeline(sizes_of(graph := frame.running(stage).graph, frame.plan), frame.hardware)
        assert any(node in timeline.queues for node in timeline.compute) == (streams == "side")
        expected = step_time([GraphOfStep(graph, timeline)])
        compiled = by_name(frame, stage)["compiled"]
        assert (compiled.seconds, compiled.exposed_seconds) == pytest.approx(expected)
        assert frame.lower_bound(stage) <= compiled.seconds


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    model=st.sampled_from(sorted(MODELS)),
    hardware=st.sampled_from(list(HARDWARE.values())) | SOME_HARDWARE,
    share=st.floats(0, 1),
)
def test_auto_is_never_slower_than_one_ahead_and_keeps_to_the_budget(
    model: str, hardware: HardwareSpec, share: float
) -> None:
    traced = model_of(model)
    for stage in ("forward", "backward"):
        free = by_name(frame_of(traced, hardware), stage)
        if list(free) == ["compiled"]:  # nothing is gathered there
            continue
        least, most = (free[name].unsharded_peak_bytes for name in ("no prefetch", "auto"))
        budget = int(least + share * (most - least))
        tight = by_name(frame_of(traced, hardware, budget), stage)
        for found in (free, tight):
            assert found["auto"].seconds <= 1.02 * found["1 ahead"].seconds
        assert max(tight[name].unsharded_peak_bytes for name in OTHERS) <= budget


@pytest.mark.slow
@pytest.mark.parametrize(("prefetch", "name"), [slow("off", "no prefetch"), slow(1, "1 ahead"), ("auto", "auto")])
def test_a_compiled_default_is_the_schedule_of_its_name(prefetch: int | str, name: str) -> None:
    options = {**EAGER, "prefetch": prefetch, "hardware": "cpu"}
    (frame,) = explain(GPT(16, 32, 4, 2), torch.zeros(2, 16, dtype=torch.long), world_size=8, options=options).frames
    for stage in frame.scheduled:
        compiled, *others = frame.schedules(stage)
        assert [compiled.name, *(other.name for other in others)] == ["compiled", *OTHERS]
        assert dataclasses.replace(compiled, name=name) in others


@pytest.mark.slow
def test_the_users_lists_count_in_the_compiled_schedule_alone(mesh: DeviceMesh) -> None:
    def shown(model: nn.Module) -> dict[str, Schedule]:
        return by_name(explain(model, X, options=EAGER).frames[0], "forward")

    plain, listed = shard(TwoLayers(), mesh), shard(TwoLayers(), mesh)
    listed.get_submodule("layers.0").set_modules_to_forward_prefetch(None)  # type: ignore[operator]
    assert shown(listed)["compiled"].seconds > shown(plain)["compiled"].seconds
    assert {name: shown(listed)[name] for name in OTHERS} == {name: shown(plain)[name] for name in OTHERS}


def test_the_schedule_that_runs_is_that_after_inductors_passes() -> None:
    (frame,) = explain(TwoLayers(), X, world_size=8).frames
    assert frame.running("forward") is frame.graphs["forward_last"]["pin_order"]
    stats = frame.stats["forward_last"]["pin_order"].evaluate()
    assert by_name(frame, "forward")["compiled"].exposed_seconds == stats.exposed_seconds
    assert frame.final_stages() == ["forward_last", "backward_last"]


def test_the_budget_of_the_options_holds_for_all_schedules() -> None:
    (frame,) = explained(TwoLayers, 4, memory_budget_gib=ONE_LAYER, hardware=COPIES).frames
    assert {found.unsharded_peak_bytes for found in frame.schedules("forward")} == {160}
    (unlimited,) = explained(TwoLayers, 4, hardware=COPIES).frames
    assert by_name(unlimited, "forward")["auto"].unsharded_peak_bytes == 240


def test_one_rank_has_one_schedule_and_no_bound_beyond_compute() -> None:
    (frame,) = explained(TwoLayers, 1).frames
    (compiled,) = frame.schedules("forward")
    assert (compiled.exposed_seconds, compiled.unsharded_peak_bytes) == (0, 0)
    assert frame.lower_bound("forward") == pytest.approx(compiled.seconds)


def test_a_pipeline_without_hoist_prefetch_has_its_own_schedule_alone() -> None:
    def without(pipeline: Any) -> Any:
        kept = tuple(step for step in pipeline.split if not isinstance(step, HoistPrefetch))
        return dataclasses.replace(pipeline, split=kept)

    (frame,) = explain(TwoLayers(), X, world_size=2, options={**EAGER, "passes": without}).frames
    assert [found.name for found in frame.schedules("forward")] == ["compiled"]
    assert frame.lower_bound("forward") < frame.schedules("forward")[0].seconds


def test_graphs_with_constants_are_scheduled_too() -> None:
    class Shifted(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers[0](x)
            return self.layers[1](torch.cond(y.sum() > 0, lambda t: t + 1, lambda t: t * 2, (y,)))

    with torch.no_grad():
        (frame,) = explain(Shifted(), X, world_size=2, options=EAGER).frames
    assert frame.running("inference").graph.find_nodes(op="get_attr")
    assert by_name(frame, "inference")["1 ahead"].seconds < by_name(frame, "inference")["no prefetch"].seconds


def test_a_graph_compiled_later_has_schedules_of_its_own(mesh: DeviceMesh) -> None:
    model = shard(TwoLayers(), mesh)
    loss = compiled_by_us(model, lower="eager", memory_budget_gib=1)(X).sum()
    (frame,) = explanation_of(model).frames
    assert frame.unsharded_budget_bytes == 2**30
    loss.backward()
    assert frame.scheduled == ["forward", "backward"]
    assert frame.schedules("backward")[0].seconds == pytest.approx(frame.lower_bound("backward"))


@pytest.mark.parametrize("ask", [FrameExplanation.schedules, FrameExplanation.lower_bound, FrameExplanation.why])
def test_a_stage_that_does_not_run_is_answered_with_those_that_do(ask: Callable[..., Any]) -> None:
    frame = frame_of(model_of("two_layers"), BUILTIN["h100"])
    for stage in ("joint", "forwards"):
        with pytest.raises(
            ConfigError, match=rf"there is no graph that runs in stage '{stage}'.* There are: forward, backward\."
        ):
            ask(frame, stage)


# ---- why


def test_every_launch_says_why_it_is_there() -> None:
    frame = frame_of(model_of("two_layers"), BUILTIN["h100"])
    assert frame.why("forward") == {
        "unshard_layers_0": ("hoist_prefetch: first of the graph",),
        "unshard_layers_1": ("hoist_prefetch: 1 ahead, before layers.0 is needed",),
    }
    assert frame.why("backward") == {
        "unshard_layers_1": ("hoist_prefetch: first of the graph",),
        "reduce_layers_1": ("sink_waits: waited for at the end",),
        "reduce_layers_0": ("sink_waits: waited for at the end",),
    }


def test_what_several_passes_said_stands_newest_last() -> None:
    options = {"bucket": "auto", "hardware": "cpu"}
    (frame,) = explain(TwoLayers(), X, world_size=2, options=options).frames
    for launch, reasons in frame.why("backward").items():
        passes = [reason.partition(":")[0] for reason in reasons]
        assert passes == [name for name in frame.graphs["backward"] if name in passes], launch
        assert len(passes) > 1


def test_a_launch_beside_another_of_its_unit_stands_there_for_the_same_reason() -> None:
    why = frame_of(model_of("two_dtypes"), BUILTIN["h100"]).why("forward")
    assert len(why) == 2
    assert set(why.values()) == {("hoist_prefetch: first of the graph",)}


def test_a_full_budget_is_a_reason() -> None:
    (frame,) = explained(TwoLayers, 4, memory_budget_gib=ONE_LAYER, hardware=COPIES).frames
    (reason,) = frame.why("forward")["unshard_layers_1"]
    assert reason == (
        "hoist_prefetch: 1 ahead, before layers.0 is needed; no earlier: memory budget: 2.24e-07 of 1.49e-07 GiB"
    )


def test_every_frame_answers_for_itself() -> None:
    first, second = explained(Broken, 2).frames
    assert list(first.why("forward")) == ["unshard_layers_0"]
    assert list(second.why("forward")) == ["unshard_layers_1"]
