"""What a graph launches, as the ranks compare it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.ir import launches
from fxshard.passes._base import GraphKind
from fxshard.passes.insert_collectives import InsertCollectives
from tests import graphs


def launch_texts(traced: graphs.Traced, kind: GraphKind) -> list[str]:
    gm, _ = traced.at(kind, InsertCollectives)
    return [launch.text for launch in launches.sequence(gm.graph)]


def test_lists_the_collectives_of_a_training_step_in_order() -> None:
    traced = graphs.two_layers()
    assert launch_texts(traced, "forward") == [
        "all_gather f32[10 -> 20] on group '0' for layers.0",
        "all_gather f32[10 -> 20] on group '0' for layers.1",
    ]
    assert launch_texts(traced, "backward") == [
        "reduce_scatter avg f32[20 -> 10] on group '0' for layers.1",
        "all_gather f32[10 -> 20] on group '0' for layers.1",
        "reduce_scatter avg f32[20 -> 10] on group '0' for layers.0",
    ]


def test_tells_dtypes_apart() -> None:
    traced = graphs.mixed_precision()
    assert launch_texts(traced, "forward") == ["all_gather bf16[10 -> 20] on group '0' for root"]
    assert launch_texts(traced, "backward")[-1] == "reduce_scatter avg f32[20 -> 10] on group '0' for root"


def test_lists_every_tensor_of_a_coalesced_launch() -> None:
    text = "all_gather f32[8 -> 16], f32[2 -> 4] on group '0' for root"
    assert launch_texts(graphs.frozen_weight(), "forward") == [text]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_lists_collectives_of_the_user_without_symbolic_sizes(mesh: DeviceMesh, mode: Any) -> None:
    def user_code(x: Tensor) -> Tensor:
        return funcol.all_to_all_single(funcol.all_reduce(x, "sum", mesh), None, None, mesh) + 1

    gm = make_fx(user_code, tracing_mode=mode)(torch.ones(6, 2))
    elements = "12 -> 12" if mode == "fake" else "? -> ?"
    found = launches.sequence(gm.graph)
    assert [launch.text for launch in found] == [
        f"all_reduce sum f32[{elements}] on group '0'",
        "all_to_all_single [?] on group '0'",
    ]
    assert {launch.group for launch in found} == {"0"}
