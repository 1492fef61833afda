"""Tests of what runs on a GPU; they need torch, triton and pytest alone."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def needs_cuda() -> None:
    """Skip where there is no GPU, before other fixtures ask for one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def device() -> torch.device:
    """The GPU."""
    return torch.device("cuda", torch.cuda.current_device())
