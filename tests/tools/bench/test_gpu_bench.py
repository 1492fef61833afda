"""The GPU benchmark without a GPU: what follows from measurements, the plan, and (opt in: `-m bench`) all of it."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from benchmarks import gpu_bench
from benchmarks.gpu import settings, trace
from benchmarks.gpu.gate import Gate
from benchmarks.gpu.page import page
from benchmarks.gpu.result import GpuReport, Key
from benchmarks.gpu.settings import COMPUTE, INSTANT, MAIN, Link
from benchmarks.gpu.stages import Plan, Stage
from benchmarks.gpu.talk import Job, WarmUp
from benchmarks.gpu.targets import target_rows
from benchmarks.gpu.turns import Budget, Member
from fxshard.tools.bench.config import ONE_GPU, Entry
from fxshard.tools.bench.result import Steps, SystemResult
from fxshard.tools.bench.traffic import Traffic
from fxshard.tools.bench.worker import Ready, Timed

ROOT = Path(__file__).parents[3]


def report_of(steps: dict[tuple[str, Link], float], **more: Any) -> GpuReport:
    """Steps of so many seconds without checkpointing, each in two equal rounds."""
    machine: dict[str, Any] = {"gpus": [], "cpu": "a CPU", "torch": "2.0", "python": "3", "fxshard_commit": None}
    options = {"command": "it", "world_size": 8, "microbatches": 8}
    report = GpuReport(machine=machine, options=options, tokens=100, num_params=10**6, num_units=3, **more)
    for (system, link), seconds in steps.items():
        found = report.steps.setdefault(Key(system=system, checkpointing=False, link=link), Steps())
        for _ in range(2):
            sent = Traffic(launches=3, nbytes=1000, seconds=0.05, expected_s=0.05)
            found.add(Timed(seconds=[seconds] * 3, peak_bytes=2**30, traffic=sent))
    return report


def run(name: str, **known: Any) -> SystemResult:
    return SystemResult(entry=Entry(name=name, system=name), **known)


def on(gigabytes_per_s: float) -> Link:
    return Link(gigabytes_per_s=gigabytes_per_s, latency_us=settings.LATENCY_US)


MEASURED = {
    (COMPUTE, INSTANT): 0.1,
    ("fsdp2", INSTANT): 0.12,
    ("fsdp2", MAIN): 0.16,
    ("fsdp2_best", MAIN): 0.14,
    ("fxshard_auto_100", INSTANT): 0.11,
    ("fxshard_auto_100", MAIN): 0.112,
}


def test_tokens_exposed_time_and_ratios_follow_from_the_steps() -> None:
    report = report_of(MEASURED)
    auto = Key(system="fxshard_auto_100", checkpointing=False, link=MAIN)
    fsdp2 = Key(system="fsdp2", checkpointing=False, link=MAIN)
    assert report.tokens_per_s(auto) == pytest.approx(100 / 0.112)
    assert report.exposed_s(auto) == pytest.approx(0.002)
    assert report.compute_s(auto) == pytest.approx(0.1)
    assert report.ratio(auto, fsdp2) == pytest.approx(0.7)
    assert report.ratio(auto, Key(system="fsdp2", checkpointing=True)) is None
    several = Key(system="fsdp2", checkpointing=False, link=MAIN, microbatches=8)
    assert report.tokens_per_s(several) is None


def test_targets_stand_beside_what_was_measured() -> None:
    rows = dict(target_rows(report_of(MEASURED)))
    assert rows['100 GB/s, tokens per second of both "auto": 1.25 x FSDP2'] == "1.43: met"
    assert rows['100 GB/s, tokens per second of both "auto": 1.08 x the best of the others'] == "1.25: met"
    assert rows['50 GB/s, tokens per second of both "auto": 1.25 x FSDP2'] == "not measured"
    assert rows["peak memory at most 0.85 x FSDP2's, 100 GB/s"] == "1.00: not met"
    exposed = rows["exposed at most 5% of a step where transfers take at most 0.8 x compute alone"]
    assert exposed == "100 GB/s 1.8%: met"
    assert rows["host time at most 0.5 x FSDP2's"] == "not measured"


def test_host_time_is_compared_where_both_were_measured() -> None:
    runs = [run(name, host_s=[host]) for name, host in (("fsdp2", 0.05), ("fxshard", 0.02))]
    assert dict(target_rows(report_of({}, systems=runs)))["host time at most 0.5 x FSDP2's"] == "fxshard 0.40: met"


def test_the_page_says_how_and_what_is_missing() -> None:
    runs = [
        run("fsdp2", losses=[5.0, 4.0]),
        run("fxshard", losses=[5.0, 3.0]),
        run("no_overlap", error="OutOfMemoryError: no"),
    ]
    text = page(report_of(MEASURED, systems=runs, left_out=["profile of fsdp2: no time"]))
    assert ONE_GPU in text
    assert "a CPU, torch 2.0, Python 3, commit unknown" in text
    assert "| FSDP2 | 120.0 (1.00); 833 | - | 160.0 (1.00); 625; 40.0 | - | - |" in text
    assert '| **fxshard, both "auto"** | 110.0 (0.92); 909 | - | 112.0 (0.70); 893; 2.0 | - | - |' in text
    assert "- PROBLEM: no_overlap failed: OutOfMemoryError: no" in text
    assert "- PROBLEM: the losses of fxshard and fsdp2 differ by 2.5e-01 (relative)" in text
    assert "- profile of fsdp2: no time" in text
    assert "## Without activation checkpointing" in text
    assert "## With activation checkpointing" not in text
    assert "microbatches per step" not in text, "nothing of it was measured"


def test_the_page_of_nothing_is_a_page() -> None:
    assert "not measured" in page(report_of({}))


def test_the_json_has_no_infinity() -> None:
    text = json.dumps(report_of(MEASURED).to_json(), allow_nan=False)
    first = json.loads(text)["steps"][0]
    assert first["link"]["gigabytes_per_s"] is None
    assert first["step_ms"] == pytest.approx(100)
    assert json.loads(text)["how"] == ONE_GPU


def test_losses_that_are_no_numbers_are_a_problem() -> None:
    runs = [run(name, checkpointing=True, losses=[loss]) for name, loss in (("a", 1.0), ("b", math.nan))]
    json.dumps(report_of({}, systems=runs).to_json(), allow_nan=False)
    assert report_of({}, systems=runs).problems() == [
        "the losses of b with checkpointing and a differ by inf (relative)"
    ]


def kernel(name: str, stream: int, start: float, took: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": took, "tid": 1, "args": {"stream": stream}}


def test_a_trace_says_what_the_first_stream_waits_for() -> None:
    events = [
        kernel("gemm", 7, 0, 1000),
        kernel("gemm", 7, 3000, 1000),
        kernel("gemm", 7, 5000, 1000),
        kernel("copy", 20, 500, 2000),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000, "tid": 1},
    ]
    found = trace.summary(events, steps=2, on_gpu=True)
    assert found["span_ms"] == pytest.approx(3)
    assert found["lanes"] == [
        {"lane": "stream 7", "kernels": 1.5, "busy_ms": pytest.approx(1.5)},
        {"lane": "stream 20", "kernels": 0.5, "busy_ms": pytest.approx(1)},
    ]
    assert found["main_idle_ms"] == pytest.approx(1.5)
    assert found["while_others_work_ms"] == pytest.approx(0.75)
    assert found["while_nothing_works_ms"] == pytest.approx(0.75)
    assert found["top"][0] == {"kernel": "gemm", "lane": "stream 7", "launches": 1.5, "ms": pytest.approx(1.5)}
    assert found["gaps"][0] == {
        "ms": pytest.approx(2),
        "others_work_ms": pytest.approx(1.5),
        "after": "gemm",
        "before": "gemm",
    }


def test_a_trace_without_kernels_is_read_by_threads() -> None:
    assert trace.summary([], 1, on_gpu=False)["lanes"] == []
    with pytest.raises(RuntimeError, match="no kernels"):
        trace.summary([], 1, on_gpu=True)
    host = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 10, "tid": 3}]
    assert trace.summary(host, 1, on_gpu=False)["lanes"][0]["lane"] == "thread 3"


def test_what_does_not_fit_is_left_out_and_named(tmp_path: Path) -> None:
    plan = Plan(
        model=settings.MODELS["tiny"],
        device="cpu",
        cases=(),
        world_size=8,
        microbatches=8,
        folder=tmp_path,
        num_threads=1,
    )
    report = report_of({})
    budget = Budget(start=time.time(), seconds=10)
    stage = Stage(plan, report, True, end=budget.at(1), budget=budget, save=lambda: None)
    assert stage.fits("a little", 1)
    assert not stage.fits("a lot", 100)
    assert report.left_out == ["a lot, with activation checkpointing: no time"]


def member_of(folder: Path, *, model: settings.Model, end: float) -> Member:
    case = settings.chosen(settings.all_cases(folder, ""), "fsdp2")[0]
    job = Job(entry=case.entry, model=model, device="cpu", checkpointing=False, world_size=2, folder=folder)
    return Member(case, job, run("fsdp2"), num_threads=1, end=end)


@pytest.mark.commands
@pytest.mark.timeout(120)
def test_who_answers_before_the_deadline_is_heard_however_late_one_listens(tmp_path: Path) -> None:
    member = member_of(tmp_path, model=settings.MODELS["tiny"], end=time.time() + 100)
    try:
        member.start(WarmUp())
        assert wait(member._ranks._pipes, timeout=100), "it has answered, while others are listened to"
        assert isinstance(member.answer(time.time() - 1), Ready), member.run.error
        assert member.answer(time.time()) is None
        assert "no answer after 0 s" in str(member.run.error)
        assert not member.is_alive
    finally:
        member.stop()


@pytest.mark.commands
@pytest.mark.timeout(120)
def test_who_fails_is_named_with_what_it_raised(tmp_path: Path) -> None:
    nothing = replace(settings.MODELS["tiny"], batch_size=0, seq_len=-1)
    member = member_of(tmp_path, model=nothing, end=time.time() + 100)
    try:
        member.start(WarmUp())
        assert member.answer(time.time() + 100) is None
        assert "rank 0 failed: RuntimeError" in str(member.run.error)
    finally:
        member.stop()


@pytest.mark.commands
def test_who_holds_the_device_for_too_long_ends_alone(tmp_path: Path) -> None:
    hangs = "import pathlib, sys, time; from benchmarks.gpu.gate import Gate\n"
    hangs += "with Gate(pathlib.Path(sys.argv[1]), patience_s=0.2).held(): time.sleep(60)"
    ends = subprocess.run(
        [sys.executable, "-c", hangs, str(tmp_path / "gate")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ends.returncode == 1
    assert "Timeout (0:00:00.2" in ends.stderr
    with Gate(tmp_path / "gate").held():
        pass


def test_inductors_scheduling_is_told_what_the_link_takes(tmp_path: Path) -> None:
    case = settings.chosen(settings.all_cases(tmp_path, ""), "overlapped_50")[0]
    told = case.entry.options["aten_distributed_optimizations.custom_runtime_estimation"]
    graph = fx.Graph()
    shard = graph.placeholder("shard")
    shard.meta["val"] = torch.empty(1000, dtype=torch.bfloat16)
    c10d = torch.ops._c10d_functional
    gather = graph.call_function(c10d.all_gather_into_tensor.default, (shard, 8, "0"))
    gather.meta["val"] = torch.empty(8000, dtype=torch.bfloat16)
    reduce = graph.call_function(c10d.reduce_scatter_tensor.default, (gather, "sum", 8, "0"))
    reduce.meta["val"] = torch.empty(1000, dtype=torch.bfloat16)
    expected_ms = 0.03 + 1e3 * 16000 * 7 / 8 / 50e9
    assert told(gather, None) == told(reduce) == pytest.approx(expected_ms)
    assert told(gather, 0) == pytest.approx(0.03)
    into = graph.call_function(c10d.all_gather_into_tensor_out.default, (shard, 8, "0"), {"out": gather})
    into.meta["val"] = gather.meta["val"]
    assert told(into, None) == pytest.approx(expected_ms)
    for other in (c10d.wait_tensor.default, c10d.all_gather_into_tensor_coalesced.default):
        assert told(graph.call_function(other, (gather,)), None) is None
    assert pickle.loads(pickle.dumps(told)) == told


def test_systems_are_chosen_by_name(tmp_path: Path) -> None:
    cases = settings.all_cases(tmp_path, "")
    assert [case.name for case in settings.chosen(cases, "fxshard,fsdp2")] == ["fsdp2", "fxshard"]
    with pytest.raises(SystemExit, match="fxshard_off run without activation checkpointing only"):
        gpu_bench.main(
            [*("--out", str(tmp_path), "--device", "cpu"), *("--checkpointing", "on", "--systems", "fxshard_off")]
        )
    with pytest.raises(ValueError, match="no such systems: fsdp3; there are compute, fsdp2"):
        settings.chosen(cases, "fsdp3")


def test_the_cost_model_is_told_the_speed_of_the_link(tmp_path: Path) -> None:
    cases = {case.name: case for case in settings.all_cases(tmp_path, "NVIDIA H200")}
    told = json.loads(Path(cases["fxshard_auto_50"].entry.options["hardware"]).read_text())
    assert (told["link_bandwidth"], told["link_latency"], told["memory_gib"]) == (50e9, 30e-6, 140)


@pytest.mark.commands
def test_it_is_imported_with_torch_alone() -> None:
    """As on a machine that has nothing of the project's but torch, numpy and sympy."""
    block = (
        "import sys; sys.modules.update(dict.fromkeys(('rich', 'plotly', 'matplotlib', 'transformers', 'expecttest')))"
    )
    subprocess.run([sys.executable, "-c", f"{block}; import benchmarks.gpu_bench"], cwd=ROOT, check=True)


def test_without_a_gpu_it_says_how_to_try(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_bench.main(["--out", str(tmp_path)])
    assert "--device cpu --model tiny tries everything but the GPU" in capsys.readouterr().err


@pytest.mark.bench
@pytest.mark.timeout(1200)
def test_all_of_it_on_the_cpu(tmp_path: Path) -> None:
    systems = "compute,fsdp2,fsdp2_compiled,fxshard,fxshard_auto_100,overlapped_100"
    flags = ["--device", "cpu", "--model", "tiny", "--microbatches", "2", "--minutes", "18", "--systems", systems]
    command = [sys.executable, "-m", "benchmarks.gpu_bench", "--out", str(tmp_path), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    errors = {run["system"]: run["error"] for run in found["systems"]}
    assert {name for name, error in errors.items() if error} <= {"overlapped_100"}, "which needs triton"
    assert found["left_out"] == []
    timed = {(s["system"], s["checkpointing"], s["microbatches"], s["link"]["gigabytes_per_s"]) for s in found["steps"]}
    for name in ("fsdp2", "fxshard"):
        for checkpointing in (False, True):
            assert {(name, checkpointing, 1, speed) for speed in (None, 370, 100, 50, 25)} <= timed
        assert (name, True, 2, 100) in timed
    assert found["consolidation"].keys() == {"full_optim_state_dict", "torch_full"}
    assert found["profiles"].keys() == {"fsdp2", "fxshard", "fxshard_auto_100"}
    text = (tmp_path / "gpu.md").read_text()
    assert ONE_GPU in text
