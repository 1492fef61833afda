"""The GPU lane needs torch, numpy, sympy and pytest alone, and skips with a reason where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.conftest import require_time

ROOT = Path(__file__).parents[2]

# In a process of its own: what is imported here already would hide what is missing there.
LANE = """
import sys

ABSENT = {"expecttest", "hypothesis", "jinja2", "matplotlib", "plotly", "rich", "safetensors", "scipy", "transformers"}


class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import pytest

sys.exit(pytest.main(["tests/gpu", "-m", "gpu", "-q", "-rs", "--gpu-minutes", "8"]))
"""


@pytest.mark.commands
def test_is_collected_and_skipped_where_there_is_no_gpu_and_little_is_installed() -> None:
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", LANE], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert "skipped" in summary
    assert "passed" not in summary
    assert "CUDA" in done.stdout


def test_no_gpu_test_begins_after_the_minutes_that_are_given() -> None:
    require_time(time.monotonic() + 60.0)
    with pytest.raises(pytest.skip.Exception, match="--gpu-minutes gives are over"):
        require_time(time.monotonic())
