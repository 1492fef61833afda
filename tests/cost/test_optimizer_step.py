"""What steps of optimizers cost in plans: against what a step exchanges, and numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.cost.optimizer_step import OptimizerBuilder, OptimizerCost, cost_of_step
from fxshard.errors import ConfigError
from fxshard.hardware import load
from fxshard.plan.optimizers import muon
from fxshard.plan.plan import PlanSettings, plan
from fxshard.runtime.matrix_owners import NEWTON_SCHULZ
from fxshard.testing import emulated_link
from fxshard.tools.plan.targets import optimizers_of
from tests.numerics.harness import EAGER
from tests.numerics.whole_matrices import batch, counting_bytes, muon_of_matrices, net, sharded, take_steps
from tests.plan.models import LAYERS, WIDTH, build
from tests.ranks import two_ranks

DEVICE = load("h100-sxm")


def costs(optimizer: OptimizerBuilder, world_size: Any = 8, **device: float) -> tuple[OptimizerCost, ...]:
    hardware = dataclasses.replace(DEVICE, **device).to_json()  # type: ignore[arg-type]
    x, options = batch(0, torch.float32), {**EAGER, "hardware": hardware}
    model = net(dtype=torch.float32)
    found = fxshard.explain(model, x, world_size=world_size, options=options, optimizer=optimizer)
    assert all(cost.name in repr(found) for cost in found.optimizers["optimizer"])
    return found.optimizers["optimizer"]


def whole(model: nn.Module) -> Any:
    return fxshard.whole_matrices(muon_of_matrices(model.parameters()))


def assert_exchanges_what_is_planned(num_ranks: int) -> None:
    model = sharded(net(dtype=torch.float32), init_device_mesh("cpu", (num_ranks,)))
    optimizer = whole(model)
    take_steps(model, optimizer, [0])
    with counting_bytes() as counts:
        take_steps(model, optimizer, [1])
    (planned,) = costs(whole, num_ranks)
    assert planned.matrices is not None
    assert planned.matrices.owners[torch.distributed.get_rank()].received == sum(counts) > 0
    held = [state["momentum_buffer"].nbytes for state in optimizer._held.values()]
    assert planned.state_bytes[torch.distributed.get_rank()] == sum(held)


@two_ranks
def test_two_ranks_exchange_and_keep_what_is_planned() -> None:
    assert_exchanges_what_is_planned(2)


def test_rank_0_of_8_exchanges_and_keeps_what_is_planned() -> None:
    with emulated_link(8, gigabytes_per_s=10.0, latency_us=1):
        assert_exchanges_what_is_planned(8)


def test_newton_schulz_is_counted_for_each_owner() -> None:
    (found,) = costs(whole)
    assert found.matrices is not None
    assert found.flops == [NEWTON_SCHULZ * share.cost for share in found.matrices.owners.values()]
    assert sum(found.state_bytes) == 4 * (4 * 13 * 8 + 2 * 8)


def test_elementwise_optimizers_move_what_their_definition_says() -> None:
    parameter = nn.Parameter(torch.empty(64, 64))
    nbytes, (beta1, beta2) = 64 * 64 * 4, (0.9, 0.99)
    fused = cost_of_step(torch.optim.AdamW([parameter], betas=(beta1, beta2), fused=True), DEVICE)
    assert (fused.moved_bytes, fused.state_bytes) == ([7 * nbytes], [2 * nbytes])
    assert fused.seconds == pytest.approx(7 * nbytes / DEVICE.memory_bandwidth + DEVICE.kernel_overhead)
    plain = cost_of_step(torch.optim.SGD([parameter], foreach=True), DEVICE)
    assert (plain.moved_bytes, plain.state_bytes, plain.exposed) == ([3 * nbytes], [0], 0)


def test_an_optimizer_that_reads_values_is_planned() -> None:
    (found,) = costs(lambda model: fxshard.whole_matrices(torch.optim.Adafactor(model.parameters())))
    assert max(found.computing) > 0


def test_a_slow_link_is_exposed_and_rounds_hide_what_they_can() -> None:
    slow: dict[str, float] = {"link_bandwidth": 1e6, "link_latency": 0.0}
    (found,) = costs(whole, 2, **slow)
    assert found.matrices is not None
    owners = found.matrices.owners.values()
    moved = sum(max(getattr(share, name) for share in owners) for name in ("bytes_in", "bytes_back")) / 1e6
    assert 0.9 * moved < found.exposed < moved


def test_replicas_share_matrices_where_the_network_is_fast_enough() -> None:
    device: dict[str, float] = {"ranks_per_node": 2, "network_latency": 0.0, "link_bandwidth": 1e6}
    counts = [len(costs(whole, (2, 2), **device, network_bandwidth=speed)[0].computing) for speed in (1e6, 1e3)]
    assert counts == [4, 2]


def test_a_plan_has_a_run_for_each_optimizer() -> None:
    given: dict[str, OptimizerBuilder] = {"Muon": muon, "SGD": lambda model: torch.optim.SGD(model.parameters())}
    settings = PlanSettings(param_dtype=torch.float32, schedules=("FSDP2",), optimizers=given)
    with_muon, with_sgd = plan(build, world_sizes=[8], batches=[1], settings=settings).runs
    assert (with_muon.cells[2], with_sgd.cells[2]) == ("FSDP2, Muon", "FSDP2, SGD")
    assert with_sgd.cost.memory.get("optimizer", 0) == 0
    owned = -(-LAYERS // 8)  # matrices of the rank with most
    assert with_muon.cost.steps[0].state_bytes == [*[4 * WIDTH * WIDTH * owned] * LAYERS, *[0] * (8 - LAYERS)]
    assert with_muon.cost.optimizer > with_sgd.cost.optimizer


def test_refuses_what_makes_no_optimizers() -> None:
    with pytest.raises(ConfigError, match="the function for optimizers returned str"):
        costs(lambda model: ["adam"])
    with pytest.raises(ConfigError, match="'Adam' is no optimizer to plan: give AdamW, Muon, or MODULE:FUNCTION"):
        optimizers_of("Adam")
    assert optimizers_of("Muon") is optimizers_of("fxshard.plan.optimizers:muon") is muon
