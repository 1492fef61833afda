"""The lane runs in a process of its own, with the plugin `tests.cross_cuda.no_gpu`; this says so where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cross_cuda import no_gpu

HERE = Path(__file__).parent

# What the lane imports is there where it runs, and need not be elsewhere: triton, and torch as the lane knows it.
collect_ignore_glob = [] if no_gpu.loaded else ["test_*.py", "numeric/test_*.py"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse to run the lane without the plugin, and anything else with it."""
    if not no_gpu.loaded and any("cross_cuda" in argument for argument in config.args):
        raise pytest.UsageError(f"tests/cross_cuda needs a process of its own. Run: {no_gpu.COMMAND}")
    if no_gpu.loaded and any(HERE not in item.path.parents for item in items):
        raise pytest.UsageError(f"with tests.cross_cuda.no_gpu nothing else runs. Run: {no_gpu.COMMAND}")
