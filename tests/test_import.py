"""What importing fxshard costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONAL = {"rich", "matplotlib", "plotly", "scipy", "safetensors", "transformers", "pytest", "hypothesis"}


def imported_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.commands
@pytest.mark.parametrize("module", ["fxshard", "fxshard.compile.backend", "fxshard.tools.cli"])
def test_importing_needs_nothing_optional(module: str) -> None:
    assert imported_by(module) & OPTIONAL == set()
