"""`fxshard bench` from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fxshard.tools import cli
from fxshard.tools.bench.config import SYSTEMS
from tests.tools.bench.odd_toys import PIDS

ROOT = Path(__file__).parents[3]


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fxshard.tools.cli", "bench", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def by_name(report: dict[str, Any]) -> dict[str, Any]:
    return {system["name"]: system for system in report["systems"]}


@pytest.mark.commands
@pytest.mark.multi_rank
def test_systems_on_two_ranks_are_timed_counted_and_agree(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    flags = ("--systems", "local,fsdp2,fxshard:lower=eager", "--group", "gloo", "--rounds", "2", "--json", str(path))
    done = bench("tests.tools.bench.toys:regression", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1] == "OK: all systems ran, and their losses agree."
    assert "round 2/2" in done.stdout
    assert "tests.tools.bench.toys:regression: 0.0M parameters in 3 units, 2 ranks (gloo)" in done.stdout
    report = json.loads(path.read_text())
    systems = by_name(report)
    assert list(systems) == ["local", "fsdp2", "fxshard:lower=eager"]
    for system in systems.values():
        assert system["status"] == "ok"
        assert [len(process) for process in system["step_ms"]["by_process"]] == [2]
        assert 0 < system["step_ms"]["min"] <= system["step_ms"]["median"] <= system["step_ms"]["max"]
        assert system["ratio_to"].keys() == {"local", "fsdp2"}
        assert system["losses"] == pytest.approx(report["reference_losses"], rel=1e-5) or system["name"] == "local"
    assert len(set(report["reference_losses"])) == 3, "the model trains"
    weights = 4 * sum((16 * 16 + 16, 16 * 16 + 16, 16 * 8 + 8))
    assert systems["local"]["collectives"] == {}
    assert systems["fsdp2"]["collectives"]["reduce_scatter"] == {"launches": 3, "bytes": weights}
    assert systems["fxshard:lower=eager"]["collectives"]["reduce_scatter"]["bytes"] == weights
    assert systems["fxshard:lower=eager"]["unsharded_peak_bytes"] > 0
    assert systems["local"]["losses"][0] == pytest.approx(report["reference_losses"][0], rel=1e-5)
    assert systems["local"]["losses"][1:] != report["reference_losses"][1:], "the ranks have the same batch"
    assert {"cpu", "cores", "torch", "fxshard_commit"} <= report["machine"].keys()


@pytest.mark.commands
def test_a_system_that_fails_is_a_line_of_the_table_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    flags = ("--systems", "simplefsdp,fsdp2,ddp", "--rounds", "2", "--processes", "2")
    link = ("--group", "emulated", "--world-size", "4", "--latency-us", "20")
    out = ("--json", str(path), "--out", str(tmp_path / "out"))
    done = bench("tests.tools.bench.toys:never_compiled", *flags, *link, *out)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PROBLEM: simplefsdp failed: rank 0 failed: " in done.stdout
    report = json.loads(path.read_text())
    systems = by_name(report)
    assert systems["simplefsdp"]["status"] == "failed"
    assert systems["simplefsdp"]["step_ms"] is None
    assert "Traceback" in (Path(systems["simplefsdp"]["log"]) / "rank0.log").read_text()
    assert [len(process) for process in systems["fsdp2"]["step_ms"]["by_process"]] == [2, 2]
    assert systems["fsdp2"]["collectives"]["all_gather"]["launches"] == 5
    assert systems["ddp"]["collectives"].keys() == {"all_reduce"}
    assert systems["ddp"]["losses"] == pytest.approx(report["reference_losses"], rel=1e-5)
    assert report["options"]["world_size"] == 4
    assert [problem.partition(":")[0] for problem in report["problems"]] == ["simplefsdp failed"]


@pytest.mark.commands
def test_hybrid_sharding_is_compared_on_two_links(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    systems = ("--systems", "ddp,fsdp2,fxshard:lower=eager", "--rounds", "1", "--json", str(path))
    between = ("--between-gigabytes-per-s", "0.5", "--between-latency-us", "50")
    link = ("--group", "emulated", "--world-size", "2x2", "--gigabytes-per-s", "1", *between)
    done = bench("tests.tools.bench.toys:regression", *systems, *link)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 of 4 on an emulated link, 2 replicas on a machine each" in " ".join(done.stdout.split())
    found = by_name(json.loads(path.read_text()))
    for name in ("fsdp2", "fxshard:lower=eager"):
        moved = found[name]["collectives"]
        assert moved["all_reduce"]["bytes"] == moved["reduce_scatter"]["bytes"] / 2
    assert found["ddp"]["collectives"].keys() == {"all_reduce"}


@pytest.mark.commands
def test_a_model_that_trains_nowhere_ends_the_run_with_the_reason() -> None:
    done = bench("tests.tools.bench.toys:no_loss", "--group", "emulated", "--systems", "local")
    assert done.returncode == 2
    assert "ConfigError: the loss must be a tensor of one element, got one of shape [4, 8]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.bench
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", ["gloo", "emulated"])
def test_all_systems_run_and_agree(group: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = bench("benchmarks.models:tiny", "--group", group, "--rounds", "1", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    systems = by_name(json.loads(path.read_text()))
    assert systems.keys() == SYSTEMS.keys()
    launches = {
        name: tuple(system["collectives"][op]["launches"] for op in ("all_gather", "reduce_scatter"))
        for name, system in systems.items()
        if name not in ("local", "local_compiled", "ddp")
    }
    assert {launches[name] for name in ("fsdp2", "fsdp2_compiled", "fsdp2_best", "fxshard")} == {(9, 5)}
    assert launches["simplefsdp_bucketed"] < (3, 3) < (50, 50) < launches["simplefsdp"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("toys",), "'toys' names no function; write MODULE:FUNCTION"),
        (("tests.tools.bench.nowhere:f",), "there is no module 'tests.tools.bench.nowhere'"),
        (("tests.tools.bench.toys:nothing",), "tests.tools.bench.toys has no 'nothing'"),
        (("tests.tools.bench.toys:squared",), "is called without arguments, but it needs output, batch"),
        (("a:b", "--systems", "fsdp"), "--systems: unknown system 'fsdp'. Did you mean 'fsdp2'?"),
        (("a:b", "--systems", "local,local"), "--systems names local more than once"),
        (("a:b", "--systems", "fsdp2:lower=eager"), "'fsdp2:lower=eager' has options, which only fxshard takes"),
        (("a:b", "--systems", "fxshard:lower"), "is written NAME=VALUE, such as lower=eager; got 'lower'"),
        (("a:b", "--systems", "fxshard:lowr=eager"), "unknown option 'lowr'. Did you mean 'lower'?"),
        (("a:b", "--systems", "fxshard:lower=triton"), 'lower must be "inductor" or "eager"'),
        (("a:b", "--systems", ","), "--systems names nothing"),
        (("a:b", "--systems", "local", "--options", "lower=eager"), "--options are for fxshard"),
        (("a:b", "--group", "gloo", "--latency-us", "5"), "--latency-us needs --group emulated, and the group is gloo"),
        (("a:b", "--group", "emulated", "--ranks", "4"), "--group emulated is one process; say with --world-size"),
        (("a:b", "--latency-us", "-5"), "argument --latency-us: must be a number above 0, got '-5'"),
        (("a:b", "--json", "nowhere/at/all.json"), "there is no folder nowhere/at to write all.json to"),
        (("a:b", "--plot", "plot.gif"), "--plot plot.gif must end in .svg or .png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_says_what_to_do(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        status = cli.main(("bench", *argv))
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--group", "nccl"), "--group nccl needs a GPU that torch can use, and found none; use --group gloo"),
        (("--group", "emulated", "--device", "cuda"), "--device cuda needs a GPU that torch can use, and found none"),
        (("--group", "emulated", "--ctas", "8"), "--ctas needs --device cuda: on the CPU no kernel plays the link"),
        (("--device", "cuda", "--ctas", "8"), "--device, --ctas needs --group emulated, and the group is gloo"),
        (
            ("--group", "emulated", "--between-latency-us", "9"),
            "--between-... needs several machines: --world-size MACHINESxRANKS, such as 2x4",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_without_a_gpu_what_needs_one_says_so(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert cli.main(("bench", "a:b", *flags)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.commands
def test_warm_steps_are_taken_and_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, path = tmp_path / "counts", tmp_path / "report.json"
    counts.mkdir()
    monkeypatch.setenv(PIDS, str(counts))
    flags = ("--systems", "local", "--group", "emulated", "--world-size", "2", "--rounds", "2", "--warm", "3")
    done = bench("tests.tools.bench.odd_toys:counted", *flags, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    (steps,) = by_name(json.loads(path.read_text()))["local"]["step_ms"]["by_process"]
    assert len(steps) == 2
    checked, traced, rounds = 3, 1, 3  # one round is none that counts
    taken = [len(file.read_text().splitlines()) for file in counts.iterdir()]
    assert max(taken) == checked + traced + rounds * (1 + 3)
