"""Tests of what runs on a GPU; they need torch, triton and pytest alone."""

from __future__ import annotations

import math
import time

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let who has a GPU for a few minutes say so: what was found by then is printed."""
    parser.addoption("--gpu-minutes", type=float, default=math.inf, help="after which no further GPU test is begun")


@pytest.fixture(scope="session", autouse=True)
def needs_cuda() -> None:
    """Skip where there is no GPU, before other fixtures ask for one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def end(request: pytest.FixtureRequest) -> float:
    minutes: float = request.config.getoption("gpu_minutes", math.inf)
    return time.monotonic() + 60 * minutes


@pytest.fixture(autouse=True)
def has_time(end: float) -> None:
    """Begin no test after that."""
    require_time(end)


def require_time(end: float) -> None:
    """Skip what would begin after `end`, by `time.monotonic()`."""
    if time.monotonic() >= end:
        pytest.skip("the minutes that --gpu-minutes gives are over")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
