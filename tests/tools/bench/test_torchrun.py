"""`fxshard bench` on ranks that torchrun starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.bench.odd_toys import PIDS

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.multi_rank, pytest.mark.commands]


def command(*flags: str) -> list[str]:
    # Without a fixed port: that of another run may be taken.
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return [sys.executable, *torchrun, "-m", "fxshard", "bench", *flags, "--rounds", "2", "--group", "gloo"]


def torchrun(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*flags), cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=250)


def test_one_process_tells_of_all_and_a_system_that_fails_on_one_rank_is_stopped_on_all(tmp_path: Path) -> None:
    path, out = tmp_path / "report.json", tmp_path / "out"
    done = torchrun(
        "tests.tools.bench.odd_toys:lame", "--systems", "ddp,fsdp2,local", "--json", str(path), "--out", str(out)
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("PROBLEM: fsdp2 failed: rank 1 failed: ValueError: rank 1 is lame") == 1
    assert done.stdout.splitlines().count("round 2/2") == 1, "one process tells"
    report = json.loads(path.read_text())
    assert (report["options"]["ranks"], report["options"]["world_size"], report["options"]["machines"]) == (2, 2, 1)
    systems = {system["name"]: system for system in report["systems"]}
    assert {name: system["error"] for name, system in systems.items()} == {
        "ddp": None,
        "fsdp2": "rank 1 failed: ValueError: rank 1 is lame",
        "local": None,
    }
    assert "Traceback" in (Path(systems["fsdp2"]["log"]) / "rank1.log").read_text()
    assert [len(systems[name]["step_ms"]["by_process"][0]) for name in ("ddp", "local")] == [2, 2]
    assert systems["ddp"]["losses"] == pytest.approx(report["reference_losses"], rel=1e-5)
    assert systems["ddp"]["collectives"]["all_reduce"]["launches"] > 0
    assert systems["local"]["losses"][1:] != report["reference_losses"][1:], "the ranks have the same batch"


@pytest.mark.slow
def test_when_all_is_well_all_processes_end_well_and_leave_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = torchrun("tests.tools.bench.toys:regression", "--systems", "fsdp2,fxshard:lower=eager", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "OK: all systems ran, and their losses agree."
    assert list(tmp_path.glob("fxshard-bench-*")) == []


@pytest.mark.parametrize(
    "victim", ["process", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rank", "launcher"))]
)
def test_whatever_is_killed_all_processes_end_within_seconds(victim: str, tmp_path: Path) -> None:
    flags = ("tests.tools.bench.odd_toys:endless", "--systems", "local", "--out", str(tmp_path / "out"))
    environment = os.environ | {PIDS: str(tmp_path)}
    with subprocess.Popen(
        command(*flags), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            (parent, rank), other = pids_of(tmp_path, 1), pids_of(tmp_path, 0)
            os.kill({"process": parent, "rank": rank, "launcher": launcher.pid}[victim], signal.SIGKILL)
            started = time.monotonic()
            output, _ = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode != 0
    while alive := [pid for pid in (parent, rank, *other) if is_alive(pid)]:
        assert time.monotonic() - started < 30, f"{alive} live on"
        time.sleep(0.1)
    if victim == "rank":
        assert output.count("fxshard: rank 1 was ended by SIGKILL") == 1, output


def pids_of(folder: Path, rank: int) -> tuple[int, int]:
    """The process that torchrun started and its rank, once the latter runs."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ValueError):
            parent, child = (folder / f"rank{rank}").read_text().split()
            return int(parent), int(child)
        time.sleep(0.1)
    raise AssertionError(f"rank {rank} did not come so far")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # nobody may reap the orphans of a container
