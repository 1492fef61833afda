"""`fxshard calibrate`: under torchrun it writes what training finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxshard.cost import hardware
from fxshard.tools import cli

ROOT = Path(__file__).parents[2]


def test_without_other_ranks_it_says_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate"]) == 2
    assert "torchrun --nproc-per-node N -m fxshard calibrate" in capsys.readouterr().err


def calibrate(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """What two ranks of torchrun say."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "fxshard", "calibrate", *arguments],
        cwd=ROOT,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.commands
def test_ranks_of_torchrun_write_the_numbers_to_the_cache_and_to_a_file(tmp_path: Path) -> None:
    out, cache = tmp_path / "node.json", tmp_path / "cache"
    done = calibrate(str(out), cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    (kept,) = cache.rglob("*.json")
    assert done.stdout.endswith(f"wrote {kept} and {out}\n")
    assert out.read_text() == kept.read_text()
    assert hardware.load(out).source.startswith(f"{out}, measured on 2 ranks of fxshard_gloo, ")


@pytest.mark.commands
def test_a_mesh_with_replicas_has_a_file_of_its_own(tmp_path: Path) -> None:
    done = calibrate("--replicas", "2", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (kept,) = tmp_path.rglob("*.json")
    assert kept.name.startswith("cpu-2x1-of-2-")
    done = calibrate("--replicas", "3", cache=tmp_path)
    assert "--replicas 3 does not divide the 2 ranks" in done.stderr
