"""The lane runs in a process of its own, with the plugin `tests.cross_cuda.no_gpu`; this says so where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cross_cuda import no_gpu

HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse to run the lane without the plugin, and anything else with it."""
    of_lane = [item for item in items if HERE in item.path.parents]
    if of_lane and not no_gpu.loaded:
        raise pytest.UsageError(f"tests/cross_cuda needs a process of its own. Run: {no_gpu.COMMAND}")
    if no_gpu.loaded and len(of_lane) < len(items):
        raise pytest.UsageError(f"with tests.cross_cuda.no_gpu nothing else runs. Run: {no_gpu.COMMAND}")
