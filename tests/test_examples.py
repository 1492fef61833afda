"""The examples run as their first lines say, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "docs/examples").glob("*.py"))


def run_on_two_ranks(example: str, *more: str) -> str:
    """What the example prints in a few steps."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, f"docs/examples/{example}", "--steps", "3", "--lower", "eager", *more]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss.* (\S+)$", printed, re.MULTILINE)]


@pytest.mark.commands
@pytest.mark.multi_rank
@pytest.mark.parametrize("example", EXAMPLES)
def test_trains_in_every_example(example: str) -> None:
    losses = losses_in(run_on_two_ranks(example))
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.commands
@pytest.mark.multi_rank
def test_trains_block_by_block_under_lightning() -> None:
    by_block = losses_in(run_on_two_ranks("lightning_fsdp2.py", "--regional"))
    assert by_block == losses_in(run_on_two_ranks("lightning_fsdp2.py"))


@pytest.mark.parametrize("example", EXAMPLES)
def test_says_in_every_example_how_to_run_it(example: str) -> None:
    assert f"torchrun --nproc-per-node 2 docs/examples/{example}" in (ROOT / "docs/examples" / example).read_text()
