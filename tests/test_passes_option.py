"""options={"passes": fn}: users add, drop and replace passes, and third-party passes get the checks of our own."""

# ruff: noqa: E501 (an error message is as long as it is)

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard import ConfigError, GraphPass, InvariantError, PassContext, Pipeline, Property
from fxshard.compile import cache
from fxshard.hardware import BUILTIN
from fxshard.ir import collectives
from fxshard.ir.plan import FramePlan
from fxshard.options import Options
from fxshard.passes.insert_collectives import InsertCollectives
from tests import graphs
from tests.graphs import in_split

Change = Callable[[Pipeline], Any]

NO_CACHE = {"fx_graph_cache": False}  # a hit would skip the last stage, and with it what is tested here


@dataclass(frozen=True, kw_only=True)
class SinkWaits(GraphPass):
    """A third-party pass: moves every wait right before its first reader."""

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        for wait in [node for node in gm.graph.nodes if node.target is collectives.WAIT]:
            min(wait.users, key=order.__getitem__).prepend(wait)
        return True


@dataclass(frozen=True, kw_only=True)
class SkipWaits(GraphPass):
    """A faulty pass: lets compute read what is still in flight."""

    requires = frozenset({Property.COLLECTIVES})

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        for wait in [node for node in gm.graph.nodes if node.target is collectives.WAIT]:
            wait.replace_all_uses_with(wait.args[0])
            gm.graph.erase_node(wait)
        return True


@dataclass(frozen=True, kw_only=True)
class SwapLaunches(GraphPass):
    """A faulty pass, for after Inductor's: launches in another order than the ranks agreed on."""

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        first, *others = collectives.unshard_launches(gm.graph)
        if others:
            for sent in others[0].all_input_nodes:
                if sent.op != "placeholder":
                    first.prepend(sent)
            first.prepend(others[0])
        return bool(others)


@dataclass(frozen=True, kw_only=True)
class Idle(GraphPass):
    """Leaves every launch alone, and says so."""

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        for launch in collectives.unshard_launches(gm.graph):
            ctx.decline(launch, "there is nothing to hide it behind")
        return False


def in_last(*added: GraphPass) -> Change:
    return lambda pipeline: dataclasses.replace(pipeline, last=added)


def run(mesh: DeviceMesh, change: Change, lower: str = "eager", **options: Any) -> torch.nn.Module:
    model = graphs.TwoLayers()
    for unit in graphs.layers_of(model):
        fxshard.fully_shard(unit, mesh=mesh)
    options |= {"lower": lower, "passes": change, "inductor": NO_CACHE}
    compiled = torch.compile(model, backend="fxshard", options=options)
    compiled(torch.ones(2, 4)).sum().backward()
    return model


@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("where", [in_split, in_last])
def test_runs_a_third_party_pass(mesh: DeviceMesh, lower: str, where: Callable[..., Change]) -> None:
    model = run(mesh, where(SinkWaits()), lower)
    stages = fxshard.explanation_of(model).graphs
    last = "_last" if where is in_last else ""
    assert "sink_waits" in stages[f"forward{last}"]
    assert "sink_waits" in stages[f"backward{last}"]


@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("where", [in_split, in_last])
def test_blames_a_third_party_pass_for_what_it_broke(
    mesh: DeviceMesh, lower: str, where: Callable[..., Change]
) -> None:
    with pytest.raises(InvariantError, match=r"SkipWaits\(\) broke `launch_has_one_wait`"):
        run(mesh, where(SkipWaits()), lower)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_refuses_another_order_of_launches_after_the_ranks_agreed(mesh: DeviceMesh, lower: str) -> None:
    with pytest.raises(InvariantError, match=r"SwapLaunches\(\) broke `collectives_keep_their_order`"):
        run(mesh, in_last(SwapLaunches()), lower, schedule="fsdp2")


def test_shows_the_lines_around_what_a_pass_broke(mesh: DeviceMesh) -> None:
    with pytest.raises(InvariantError) as broken:
        run(mesh, in_split(SkipWaits()))
    text = str(broken.value).partition("\n\nThis is a bug")[0]
    assert_expected_inline(
        text,
        """\
SkipWaits() broke `launch_has_one_wait` in the forward graph at %getitem: expected one user, its wait; found %layers_0_weight
Rule: Every result of a launch is read by its wait alone, or by copies on a side stream, each with its wait.

   %shard_layers_0: f32[10] = input  # flat of layers.0
   %x: f32[2, 4] = input
   %shard_layers_1: f32[10] = input  # flat of layers.1
   %slice_5: f32[8] = aten.slice.Tensor(%shard_layers_0, 0, 0, 8)
   %slice_6: f32[2] = aten.slice.Tensor(%shard_layers_0, 0, 8, 10)
   %unshard_layers_0: (f32[16], f32[4]) = c10d.all_gather_into_tensor_coalesced([%slice_5, %slice_6], 2, '0')  # unit=layers.0@0
-> %getitem: f32[16] = getitem(%unshard_layers_0, 0)
   %getitem_1: f32[4] = getitem(%unshard_layers_0, 1)
   %slice_7: f32[8] = aten.slice.Tensor(%shard_layers_1, 0, 0, 8)
   %slice_8: f32[2] = aten.slice.Tensor(%shard_layers_1, 0, 8, 10)
   %unshard_layers_1: (f32[16], f32[4]) = c10d.all_gather_into_tensor_coalesced([%slice_7, %slice_8], 2, '0')  # unit=layers.1@0
   %getitem_2: f32[16] = getitem(%unshard_layers_1, 0)
   %getitem_3: f32[4] = getitem(%unshard_layers_1, 1)
   %layers_0_weight: f32[4, 4] = aten.view(%getitem, [4, 4])  # param=layers.0.weight
   %layers_0_bias: f32[4] = aten.view(%getitem_1, [4])  # param=layers.0.bias
   %mm: f32[2, 4] = aten.mm(%x, %layers_0_weight)
   %add: f32[2, 4] = aten.add.Tensor(%mm, %layers_0_bias)""",
    )


def test_says_what_a_pass_left_alone(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fxshard.passes")
    model = run(mesh, in_split(Idle()))
    record = fxshard.explanation_of(model).graphs["forward"]["idle"]
    assert [d.node for d in record.declined] == ["unshard_layers_0", "unshard_layers_1"]
    assert not record.changed
    assert "idle: left %unshard_layers_0 alone: there is nothing to hide it behind" in caplog.text


def test_replaces_a_pass(mesh: DeviceMesh) -> None:
    class Other(InsertCollectives):
        """The same under another name."""

    change: Change = lambda p: dataclasses.replace(p, split=(*p.split[:-1], Other()))  # noqa: E731
    assert list(fxshard.explanation_of(run(mesh, change)).graphs["forward"])[-1] == "other"


def test_checks_the_types_of_all_nodes_when_debugging(mesh: DeviceMesh) -> None:
    run(mesh, in_split(SinkWaits()), verify="debug")


def test_lets_the_verifier_be_switched_off(mesh: DeviceMesh) -> None:
    run(mesh, in_last(SwapLaunches()), verify=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: None, "must return a Pipeline, got NoneType"),
        (lambda p: dataclasses.replace(p, split=[SinkWaits()]), r"Pipeline.split must be a tuple of GraphPass"),
        (lambda p: dataclasses.replace(p, split=(*p.split, SinkWaits)), r"Pipeline.split must be a tuple of GraphPass"),
        (lambda p: dataclasses.replace(p, split=p.split[:1]), "stage 'split': nothing ensures COLLECTIVES"),
        (lambda p: dataclasses.replace(p, joint=p.joint[:1]), "stage 'joint': nothing ensures RESHARD_TAGGED"),
        (
            lambda p: dataclasses.replace(p, split=p.split[3:]),
            r"a property is missing. OffloadShards\(\) requires DEDUPED",
        ),
    ],
)
def test_refuses_a_pipeline_that_cannot_shard(mesh: DeviceMesh, change: Change, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(mesh, change)


def test_tells_compile_caches_apart_by_added_passes() -> None:
    def digest(pipeline: Pipeline) -> str | None:
        return cache.digest(Options(), FramePlan(units={}, shard_inputs={}), pipeline, BUILTIN["cpu"])

    pipeline = Pipeline(joint=(), split=())
    digests = {
        digest(changed) for changed in (pipeline, in_split(SinkWaits())(pipeline), in_last(SinkWaits())(pipeline))
    }
    assert len(digests) == 3
    assert None not in digests
