"""HoistPrefetch(depth="auto"): as far ahead as it takes to hide a gather, and no further."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from expecttest import assert_expected_inline
from torch import nn

from fxshard.hardware import BUILTIN, HardwareSpec
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.insert_collectives import InsertCollectives
from tests import graphs
from tests.graphs import Traced, layers_of, run_pass, trace
from tests.models import Doing, matrix

KERNEL = 1e-3
"""Seconds of each kernel; its work takes next to none."""


def wide() -> nn.Module:
    """Four floats in and out, and in between as many as it takes for a gather of 3200 bytes on two ranks."""
    return Doing(lambda m, x: x @ m.up @ m.down, up=matrix(4, 100), down=matrix(100, 4))


class WideAfterThin(graphs.Layers):
    """Five layers of 80 bytes, of four kernels each with their copies, wide ones, and a thin one at the end."""

    def __init__(self, num_wide: int) -> None:
        super().__init__(5)
        self.layers.extend([*(wide() for _ in range(num_wide)), graphs.Layer()])


def link(bytes_per_kernel: float) -> HardwareSpec:
    """A link that sends so many bytes of a buffer (half of it, for two ranks) while one kernel runs."""
    return dataclasses.replace(
        BUILTIN["cpu"],
        peak_flops={"f32": 1e18},
        memory_bandwidth=1e18,
        kernel_overhead=KERNEL,
        link_latency=0.0,
        link_bandwidth=bytes_per_kernel / 2 / KERNEL,
    )


def auto(traced: Traced, hardware: HardwareSpec, **context: Any) -> str:
    """Why each gather of forward stands where it stands."""
    gm, ctx = traced.at("forward", after=InsertCollectives)
    ctx = dataclasses.replace(ctx, hardware=hardware, **context)
    run_pass(HoistPrefetch(depth="auto"), gm, ctx)
    return "\n".join(f"{note.node}: {note.why}" for note in ctx.notes)


@functools.cache
def thin_and_wide(num_wide: int = 1) -> Traced:
    return trace(WideAfterThin(num_wide), units=layers_of)


@pytest.mark.parametrize(
    ("link_bytes", "ahead"), [(1e9, "1 ahead, before layers.4"), (300, "2 ahead, before layers.3")]
)
def test_goes_as_far_ahead_as_a_large_unit_needs_and_no_further(link_bytes: float, ahead: str) -> None:
    small = [f"unshard_layers_{i}: 1 ahead, before layers.{i - 1} is needed" for i in range(1, 7)]
    expected = ["unshard_layers_0: first of the graph", *small[:4], f"unshard_layers_5: {ahead} is needed", small[5]]
    assert auto(thin_and_wide(), link(bytes_per_kernel=link_bytes)).splitlines() == expected


@pytest.mark.slow
def test_goes_no_further_where_the_link_is_never_idle() -> None:
    expected = auto(thin_and_wide(), link(bytes_per_kernel=1e9))  # one ahead, as above
    assert auto(thin_and_wide(), link(bytes_per_kernel=5)) == expected


def test_stops_where_the_budget_ends() -> None:
    traced, hardware = thin_and_wide(num_wide=2), link(bytes_per_kernel=300)
    assert_expected_inline(
        auto(traced, hardware, unsharded_budget_bytes=7000),
        """\
unshard_layers_0: first of the graph
unshard_layers_1: 1 ahead, before layers.0 is needed
unshard_layers_2: 1 ahead, before layers.1 is needed
unshard_layers_3: 1 ahead, before layers.2 is needed
unshard_layers_4: 1 ahead, before layers.3 is needed
unshard_layers_5: 2 ahead, before layers.3 is needed
unshard_layers_6: 1 ahead, before layers.5 is needed; no earlier: memory budget: 8.94e-06 of 6.52e-06 GiB
unshard_layers_7: 1 ahead, before layers.6 is needed""",
    )
