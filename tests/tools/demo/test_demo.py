"""The demo from end to end, and what becomes of it when a rank or the user ends it early."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fxshard.tools.demo.config import DemoConfig
from fxshard.tools.demo.events import Event, Step
from fxshard.tools.demo.run import events_of_ranks
from fxshard.tools.launch.ranks import RankError

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.multi_rank, pytest.mark.commands]


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "fxshard.tools.cli", "demo", "--device", "cpu", "--seq-len", "32", *flags]


def wait_for_first_step(events: Generator[Event]) -> None:
    for event in events:
        if isinstance(event, Step):
            return


def group_ends(group: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def endless(out: Path) -> DemoConfig:
    return DemoConfig(ranks=2, device="cpu", out=out, steps=100_000, seq_len=32, lower="eager", compare=False)


@pytest.mark.parametrize("model", ["gpt", pytest.param("hf:llama", marks=pytest.mark.slow)])
def test_a_short_demo_trains_compares_and_writes_its_graphs(model: str, tmp_path: Path) -> None:
    flags = ("--lower", "eager", "--steps", "4", "--model", model, "--out", str(tmp_path))
    done = subprocess.run(command(*flags), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("OK: the loss fell from 5.")
    assert any(line.startswith("stored per rank") and "50." in line for line in lines)
    assert any(line.startswith("largest difference") for line in lines)
    assert "\x1b" not in done.stdout
    assert "all_gather" in (tmp_path / "forward.txt").read_text()
    assert "reduce_scatter" in (tmp_path / "backward.txt").read_text()


def ranks_of_the_demo() -> list[str]:
    """Those that run; other tests may keep a pool of ranks."""
    return [child.name for child in multiprocessing.active_children() if child.name.startswith("fxshard-rank")]


def test_a_killed_rank_is_named_and_takes_the_others_along(tmp_path: Path) -> None:
    with closing(events_of_ranks(endless(tmp_path))) as events:
        wait_for_first_step(events)
        (victim,) = (child for child in multiprocessing.active_children() if child.name == "fxshard-rank1")
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RankError, match="rank 1 was ended by SIGKILL"):
            for _ in events:
                pass
    assert time.monotonic() - started < 20
    assert ranks_of_the_demo() == []


def test_a_rank_that_raises_is_named_and_its_log_holds_the_traceback(tmp_path: Path) -> None:
    too_long = DemoConfig(ranks=2, device="cpu", out=tmp_path, seq_len=10**9, lower="eager")
    with pytest.raises(RankError, match=r"rank \d failed: ConfigError: the Python sources") as raised:
        list(events_of_ranks(too_long))
    log = Path(str(raised.value).rpartition(" ")[2])
    assert "Traceback" in log.read_text()
    assert ranks_of_the_demo() == []


def test_silence_ends_the_demo(tmp_path: Path) -> None:
    impatient = DemoConfig(ranks=2, device="cpu", out=tmp_path, lower="eager", stall_s=0.01)
    with pytest.raises(RankError, match=r"no rank has made progress for 0.01 s"):
        list(events_of_ranks(impatient))
    assert ranks_of_the_demo() == []


def test_closing_the_events_stops_the_ranks(tmp_path: Path) -> None:
    events = events_of_ranks(endless(tmp_path))
    wait_for_first_step(events)
    events.close()
    assert ranks_of_the_demo() == []


@contextlib.contextmanager
def heeds_ctrl_c() -> Iterator[None]:
    """Let processes that are started inside heed Ctrl-C, also where a shell runs the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_all_processes_within_seconds(tmp_path: Path) -> None:
    flags = ("--lower", "eager", "--steps", "100000", "--no-compare", "--out", str(tmp_path))
    with (
        heeds_ctrl_c(),
        subprocess.Popen(
            command(*flags), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as demo,
    ):
        try:
            assert demo.stdout is not None
            while "step 1/" not in (line := demo.stdout.readline()):
                assert line, "the demo ended before its first step"
            os.killpg(demo.pid, signal.SIGINT)  # a terminal signals the whole group
            _, error = demo.communicate(timeout=20)
            all_gone = group_ends(demo.pid, within_s=10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(demo.pid, signal.SIGKILL)
    assert demo.returncode == 130
    assert error == "fxshard: interrupted\n"
    assert all_gone
