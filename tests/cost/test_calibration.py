"""calibrate: what it finds of a link whose speed is known, and of ranks."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxshard.cost.calibration import Calibration
from fxshard.hardware import HardwareSpec
from fxshard.testing import Speed, emulated_link
from tests.ranks import two_ranks

CPU = torch.device("cpu")

TIMES = 8
"""A machine that does other things finds a link slower than it is; once of so many times it is left alone."""


def on_link(world_size: int, gigabytes_per_s: float = math.inf, latency_us: float = 0.0) -> HardwareSpec:
    with emulated_link(world_size, gigabytes_per_s=gigabytes_per_s, latency_us=latency_us):
        assert dist.group.WORLD is not None
        return Calibration([dist.group.WORLD], CPU).run()


@pytest.mark.parametrize(
    ("world_size", "gigabytes_per_s", "latency_us"), [(8, 0.2, 1500.0), (2, 0.05, 1000.0), (64, 0.2, 2000.0)]
)
def test_finds_bandwidth_and_latency_of_an_emulated_link(
    world_size: int, gigabytes_per_s: float, latency_us: float
) -> None:
    bandwidth: Any = pytest.approx(gigabytes_per_s * 1e9, rel=0.1)
    latency: Any = pytest.approx(latency_us * 1e-6, rel=0.2)
    for _ in range(TIMES):
        spec = on_link(world_size, gigabytes_per_s=gigabytes_per_s, latency_us=latency_us)
        if spec.link_bandwidth == bandwidth and spec.link_latency == latency:
            break
    assert (spec.link_bandwidth, spec.link_latency) == (bandwidth, latency)
    assert spec.source == f"measured on {world_size} ranks of emulated"


def test_a_link_that_takes_no_time_has_a_speed_all_the_same() -> None:
    spec = on_link(4)
    assert spec.link_bandwidth > 1e8
    assert 0 < spec.link_latency < 0.1


def test_tells_how_fast_products_of_each_size_and_attention_are() -> None:
    told: list[str] = []
    with emulated_link(2):
        assert dist.group.WORLD is not None
        spec = Calibration([dist.group.WORLD], CPU).run(told.append)
    assert told == ["kernels", *(f"products, {name}" for name in spec.peak_flops), "copies", "attention", "links"]
    assert max(share for _, share in spec.gemm_efficiency) == 1.0
    assert all(0 < share < 2 for share in spec.attention_efficiency)
    assert spec.attention_efficiency != HardwareSpec.attention_efficiency


def test_every_number_has_two_digits() -> None:
    spec = on_link(2, gigabytes_per_s=1.0, latency_us=50.0)
    numbers = [spec.link_bandwidth, spec.link_latency, spec.memory_bandwidth, *spec.peak_flops.values()]
    assert [float(f"{number:.1e}") for number in numbers] == pytest.approx(numbers, rel=1e-12)


def test_takes_about_a_second_at_most_also_where_a_launch_takes_long() -> None:
    with emulated_link(8, gigabytes_per_s=0.05, latency_us=5000.0):
        assert dist.group.WORLD is not None
        began = time.perf_counter()
        Calibration([dist.group.WORLD], CPU).run()
        assert time.perf_counter() - began < 3  # on a machine that does other things, too


def test_leaves_random_numbers_modes_and_gradients_alone() -> None:
    with emulated_link(2, latency_us=50.0):
        assert dist.group.WORLD is not None
        before = torch.random.get_rng_state()
        with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
            spec = Calibration([dist.group.WORLD], CPU).run()
            assert torch.is_inference_mode_enabled()
        assert torch.equal(torch.random.get_rng_state(), before)
    assert spec.peak_flops.keys() == {"bf16", "f16", "f32", "f64"}


def test_the_link_between_replicas_has_numbers_of_its_own() -> None:
    between = Speed(gigabytes_per_s=0.05, latency_us=3000.0)
    for _ in range(TIMES):
        with emulated_link(8, gigabytes_per_s=0.2, latency_us=1000.0, ranks_per_machine=4, between_machines=between):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
            spec = Calibration([mesh["shard"].get_group(), mesh["replicate"].get_group()], CPU).run()
        found = [
            spec.link_bandwidth,
            spec.replica_link(2, 4).bandwidth,
            spec.link_latency,
            spec.replica_link(2, 4).latency,
        ]
        wanted = pytest.approx([0.2e9, 0.05e9, 1e-3, 3e-3], rel=0.2)
        if found == wanted:
            break
    assert found == wanted
    assert spec.source == "measured on 2 x 4 ranks of emulated"


@two_ranks
def test_all_ranks_get_the_same_numbers() -> None:
    assert dist.group.WORLD is not None
    spec = Calibration([dist.group.WORLD], CPU).run()
    texts: list[str | None] = [None, None]
    dist.all_gather_object(texts, spec.to_json())
    assert texts[0] == texts[1]
    assert spec.source == "measured on 2 ranks of fxshard_gloo"
