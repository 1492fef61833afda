"""What CUDA graphs need of a compiled graph, as far as that shows without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._subclasses.fake_tensor import FakeTensorMode

from fxshard.compile import cudagraphs
from fxshard.errors import UnsupportedGraph
from fxshard.ir import tags
from fxshard.ir.variant import Variant
from fxshard.options import Options
from fxshard.passes.accumulate_gradients import AccumulateGradients
from fxshard.passes.dedup_unshard import DedupUnshard
from tests import graphs

ON, OFF = Options(cudagraphs=True), Options()


def test_flats_and_accumulators_stay_where_they_are() -> None:
    traced = graphs.trace(graphs.Layer(), reshard_after_forward=True)
    gm, ctx = traced.at("backward", after=DedupUnshard)
    graphs.run_pass(AccumulateGradients(which=Variant(accumulates=frozenset({""}))), gm, ctx)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    accumulators = [i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if tags.meta_of(node).acc]
    assert len(accumulators) == 2
    assert cudagraphs.static_inputs(ON, gm.graph, [0]) == sorted({0, *accumulators}), names
    assert cudagraphs.static_inputs(OFF, gm.graph, [0]) == [0]


def test_flats_of_a_forward_stay_where_they_are() -> None:
    traced = graphs.two_layers()
    gm, _ = traced.at("forward")
    flats = [i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if tags.meta_of(node).shard]
    assert cudagraphs.static_inputs(ON, gm.graph, ()) == flats
    assert len(flats) == 2


def test_inductor_knows_the_flags() -> None:
    known = inductor_config.get_config_copy()
    assert cudagraphs.patches(ON, known)["triton.cudagraphs"] is True
    assert cudagraphs.patches(ON, known)["graph_partition"] is False
    assert cudagraphs.patches(OFF, known) == {"triton.cudagraphs": False}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (SimpleNamespace(cudagraph_info=None, disabled_cudagraphs_reason="cpu device (x)"), r"cpu device \(x\)"),
        (SimpleNamespace(cudagraph_info=SimpleNamespace(cudagraph_fail_reasons=["a", "b"])), "a, b"),
        (SimpleNamespace(), "Inductor gives no reason"),
    ],
)
def test_what_cannot_be_recorded_is_an_error_that_says_why(code: Any, why: str) -> None:
    with pytest.raises(UnsupportedGraph, match=f"the backward graph cannot be recorded: {why}"):
        cudagraphs.require_recordable(ON, code, "backward")
    cudagraphs.require_recordable(OFF, code, "backward")


def test_what_inductor_records_is_no_error() -> None:
    code = SimpleNamespace(cudagraph_info=SimpleNamespace(cudagraph_fail_reasons=[]), disabled_cudagraphs_reason=None)
    cudagraphs.require_recordable(ON, code, "forward")


def test_results_of_a_backward_outlive_the_next_replay() -> None:
    pool = torch.zeros(3)

    def replay(inputs: list[Any]) -> Any:
        return pool.add_(1), None

    first, nothing = cudagraphs.guarded(ON, replay, "backward", {})([])
    replay([])
    assert torch.equal(first, torch.ones(3))
    assert nothing is None
    assert cudagraphs.guarded(ON, replay, "forward", {})([])[0] is pool
    assert cudagraphs.guarded(OFF, replay, "backward", {}) is replay


def test_a_graph_that_ran_without_being_recorded_is_an_error() -> None:
    skips = {"cudagraph_skips": 3}

    def skip(inputs: list[Any]) -> Any:
        skips["cudagraph_skips"] += 1
        return ()

    with pytest.raises(UnsupportedGraph, match="the forward graph was not recorded when it ran"):
        cudagraphs.guarded(ON, skip, "forward", skips)([])


def test_a_backward_by_itself_is_told_where_its_forward_runs() -> None:
    given = {"boxed_forward_device_index": BoxedDeviceIndex(None)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(2), torch.empty(2, device="cuda:1")]
    cudagraphs.left_out(OFF, inputs, given)
    assert given["boxed_forward_device_index"].value is None
    cudagraphs.left_out(ON, inputs, given)
    assert given["boxed_forward_device_index"].value == 1
