"""The benchmarks hold what the project promises (opt in: `-m bench`), and measure what they say (always)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import explain_405b, manager_share, pipeline_time
from benchmarks.clock import APPLY, HISTORY, RECOMPILE, VERIFY, clocked
from tests import graphs

ROOT = Path(__file__).parents[3]


def test_the_parts_add_up_to_the_manager() -> None:
    start = time.perf_counter()
    with clocked() as clock:
        graphs.trace(graphs.TwoLayers(), units=graphs.layers_of)
    whole = time.perf_counter() - start
    assert clock.num_nodes > 0
    assert all(clock.seconds[part] > 0 for part in (APPLY, HISTORY, RECOMPILE, VERIFY))
    assert min(clock.seconds.values()) >= 0
    assert clock.overhead == pytest.approx(clock.total - clock.seconds[APPLY])
    assert clock.total < whole


def test_nothing_is_counted_after_the_clock_stopped() -> None:
    with clocked() as clock:
        pass
    graphs.trace(graphs.TwoLayers(), units=graphs.layers_of)
    assert (clock.total, clock.num_nodes) == (0, 0)


@pytest.mark.bench
@pytest.mark.timeout(1200)
def test_manager_and_verifier_take_under_3_percent_of_a_cold_compile() -> None:
    assert manager_share.measure(32, 256).share < manager_share.TARGET


@pytest.mark.bench
@pytest.mark.timeout(1200)
def test_the_pipeline_is_linear_in_the_number_of_nodes() -> None:
    setting = pipeline_time.SETTINGS[0]
    pipeline_time.measure(1, setting)
    slope = pipeline_time.slope([pipeline_time.measure(layers, setting) for layers in pipeline_time.LAYERS])
    assert math.isfinite(slope)
    assert slope < pipeline_time.MAX_SLOPE


@pytest.mark.bench
@pytest.mark.timeout(1200)
def test_llama_3_405b_is_explained_within_5_minutes_and_8_gib() -> None:
    command = [sys.executable, "-m", "benchmarks.explain_405b"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["units"], found["frames"]) == (127, 1)
    assert found["explain_s"] < explain_405b.MAX_SECONDS
    assert found["explain_gib"] < explain_405b.MAX_GIB
