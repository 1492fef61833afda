"""Collectives in graphs: the division rule is FSDP2's, launches are found, and the ranks compare what each sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.ir import collectives, launches
from fxshard.ir.collectives import Division, division
from fxshard.passes._base import GraphKind
from fxshard.passes.insert_collectives import InsertCollectives
from tests import graphs

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


class Ranks:
    """All that the rule asks of a process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def size(self) -> int:
        return self.world_size


def rule_of_fsdp2(world_size: int, dtype: torch.dtype) -> tuple[float, Any, float]:
    group: Any = Ranks(world_size)
    before, after, op, _ = _get_gradient_divide_factors(group, None, dtype, "cpu")
    return before or 1, op, after or 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [*range(1, 9), 16])
def test_divides_as_fsdp2_does(world_size: int, dtype: torch.dtype) -> None:
    rule = division(world_size, dtype)
    assert (rule.before, OPS[rule.op], rule.after) == rule_of_fsdp2(world_size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", range(1, 17))
def test_makes_a_mean_of_a_sum(world_size: int, dtype: torch.dtype) -> None:
    rule = division(world_size, dtype)
    assert rule.before * rule.after == (1 if rule.op == "avg" else world_size)


def test_divides_half_precision_on_both_sides_of_the_sum() -> None:
    assert division(8, torch.float16) == Division(before=4, op="sum", after=2)


@pytest.mark.parametrize(
    ("kind", "gathered", "reduced"),
    [("forward", ["unshard_layers_0", "unshard_layers_1"], []), ("backward", ["unshard_layers_1"], ["1", "0"])],
)
def test_finds_launches_in_program_order(kind: GraphKind, gathered: list[str], reduced: list[str]) -> None:
    gm, _ = graphs.two_layers().at(kind, after=InsertCollectives)
    assert [node.name for node in collectives.unshard_launches(gm.graph)] == gathered
    assert [node.name for node in collectives.reduce_launches(gm.graph)] == [f"reduce_layers_{i}" for i in reduced]


def test_finds_a_coalesced_launch() -> None:
    gm, _ = graphs.frozen_weight().at("forward", after=InsertCollectives)
    (launch,) = collectives.unshard_launches(gm.graph)
    assert launch.target is collectives.ALL_GATHER_COALESCED


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
