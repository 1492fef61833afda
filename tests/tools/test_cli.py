"""The command line: help, versions and errors; what the commands do is tested with them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from fxshard import hardware
from fxshard.errors import ConfigError
from fxshard.hardware import BUILTIN
from fxshard.plan.plan import PlanSettings
from fxshard.plan.policies import read_policies
from fxshard.plan.recommend import recommend
from fxshard.tools import cli
from tests.plan.models import LAYERS, build


def exit_status(*argv: str) -> int:
    try:
        return cli.main(argv)
    except SystemExit as ended:  # argparse's own way
        return int(ended.code or 0)


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--version") == 0
    assert capsys.readouterr().out.startswith("fxshard ")


def test_the_package_runs_as_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fxshard", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fxshard", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("fxshard ")


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--help") == 0
    text = capsys.readouterr().out
    assert "demo" in text
    assert "explain" in text


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status() == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "calibrate", "demo", "explain", "plan"])
def test_help_explains_every_argument(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(command, "--help") == 0
    text = capsys.readouterr().out
    subparsers = cli._parser()._subparsers
    assert subparsers is not None
    (choices,) = (action.choices for action in subparsers._group_actions)
    assert isinstance(choices, dict)
    for action in choices[command]._actions:
        assert action.help, action.dest
        assert str([*action.option_strings, action.metavar][0]) in text


def test_plan_prints_a_line_for_each_run_and_draws_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ("plan", "tests.plan.models:build", "--world-size", "8,2x8", "--batch", "2", "--schedule", "FSDP2")
    page, trace = tmp_path / "plan.html", tmp_path / "plan.json"
    assert exit_status(*argv, "--html", str(page), "--trace", str(trace)) == 0
    assert "2x8" in page.read_text()
    assert "2x8 2 FSDP2" in trace.read_text()
    told = capsys.readouterr()
    assert [line.split("│")[1:4] for line in told.out.splitlines() if "FSDP2" in line] == [
        ["     8 ", "     2 ", " FSDP2    "],
        ["   2x8 ", "     2 ", " FSDP2    "],
    ]
    assert told.err.splitlines() == [
        *("8 ranks, batch 2, FSDP2", "2x8 ranks, batch 2, FSDP2"),
        *(f"wrote {page}", f"wrote {trace}"),
    ]


def test_plan_draws_what_budgets_buy(tmp_path: Path) -> None:
    argv = ("plan", "tests.plan.models:build", "--world-size", "8", "--schedule", "FSDP2")
    page, policies = tmp_path / "plan.html", tmp_path / "policies.json"
    written = ("--html", str(page), "--write", str(policies))
    assert exit_status(*argv, "--memory-budget-gib", "1", "--policies", "keep", *written) == 0
    found = recommend(build, world_size=8, settings=PlanSettings(schedules=("FSDP2",)), kinds=["keep"])
    assert len(found.pareto) > 1
    points = [[mix.cost.peak_bytes, mix.cost.seconds] for mix in found.pareto]
    assert f'"pareto": {json.dumps(points)}' in page.read_text()
    assert read_policies(policies) == found.policies
    assert found.policies.keys() == {f"blocks.{i}" for i in range(LAYERS)}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("llama3-9b", "--world-size", "8"), "did you mean 'llama3-8b'?"),
        (("llama3-8b", "--world-size", "8,12x"), "must be a number of ranks, or replicas x shards such as 4x8"),
        (("llama3-8b", "--world-size", "12"), "1 x 12 ranks do not divide into nodes of 8 ranks (h100-sxm)."),
        (("llama3-8b", "--world-size", "8", "--hardware", "h100-sxn"), "did you mean 'h100-sxm'?"),
        (("llama3-8b", "--world-size", "8", "--schedule", "FSDP3"), "there is no schedule FSDP3"),
        (("tests.plan.models:build", "--world-size", "8", "--checkpointing", "full"), "is for built-in shapes"),
        (("llama3-8b", "--world-size", "8", "--html", "nowhere/plan.html"), "there is no folder nowhere to write"),
        (("llama3-8b", "--world-size", "8", "--html", "."), ". cannot be written: it is a folder"),
        (("llama3-8b", "--world-size", "8", "--policies", "keep"), "and needs --memory-budget-gib"),
        (("llama3-8b", "--world-size", "8", "--policies", "x", "--memory-budget-gib", "9"), "there is no policy x"),
        (("llama3-8b", "--world-size", "8", "--memory-budget-gib", "inf"), "must be a number above 0"),
    ],
)
def test_plan_names_what_it_cannot_plan(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status("plan", *argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--steps", "1"), "argument --steps: must be a whole number, 2 or more, got '1'"),
        (("--ranks", "0"), "argument --ranks: must be a whole number, 1 or more, got '0'"),
        (("--batch-size", "2.5"), "argument --batch-size: must be a whole number, 1 or more, got '2.5'"),
        (("--seq-len", "-4"), "argument --seq-len: must be a whole number, 2 or more, got '-4'"),
        (("--model", "bert"), "argument --model: invalid choice: 'bert'"),
        (("--lower", "triton"), "argument --lower: invalid choice: 'triton'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_wrong_value_names_the_flag_and_what_it_takes(
    argv: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status("demo", *argv) == 2
    assert message in capsys.readouterr().err


def test_an_error_of_ours_is_a_message_without_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxshard.tools.demo.run.run_demo", _raise(ConfigError("seq_len must be smaller.")))
    assert exit_status("demo") == 2
    assert capsys.readouterr().err == "fxshard: seq_len must be smaller.\n"


def test_interrupting_is_not_an_error_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxshard.tools.demo.run.run_demo", _raise(KeyboardInterrupt()))
    assert exit_status("demo") == 130
    assert capsys.readouterr().err == "fxshard: interrupted\n"


def test_an_output_folder_that_cannot_be_made_is_a_clear_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert exit_status("demo", "--out", str(tmp_path / "file")) == 2
    assert "cannot be used as a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "option", "value", "error"),
    [
        (1, "--ranks", "2", "--ranks 2 needs 2 GPUs, and there are 1"),
        (0, "--device", "cuda", "--device cuda needs a GPU"),
    ],
)
def test_more_gpus_than_there_are_is_a_clear_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpus: int, option: str, value: str, error: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert exit_status("demo", option, value) == 2
    assert error in capsys.readouterr().err


# ---- explain

MODULE = """
import torch
from tests.graphs import TwoLayers

build = lambda: (TwoLayers(), (torch.ones(2, 4),), {})
one_input = lambda: (TwoLayers(), torch.ones(2, 4))
alone = lambda: TwoLayers()
needing = lambda size: TwoLayers()
wrong = lambda: (torch.ones(2, 4), TwoLayers())
wrong_names = lambda: (TwoLayers(), (torch.ones(2, 4),), ["x"])
number = 3

class NoInputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self):
        return self.weight.sum()

def failing():
    raise LookupError("no such size")
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory holds `my_module.py`."""
    (tmp_path / "my_module.py").write_text(MODULE)
    (tmp_path / "needy.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    sys.modules.pop("my_module", None)


def test_explain_prints_a_table_of_all_graphs(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("explain", "my_module:build", "--world-size", "64", "--lower", "eager") == 0
    text = capsys.readouterr().out
    assert text.startswith("Explanation of TwoLayers: 2 units, world size 64, 1 frame")
    assert "1 all_gather, 2 reduce_scatter" in text
    assert max(map(len, text.splitlines())) <= 140
    assert "times are estimates for h100" in text
    assert text.count("no schedule can beat") == 2


def test_explain_shows_replicas(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("explain", "my_module:build", "--world-size", "4x8", "--lower", "eager") == 0
    text = capsys.readouterr().out
    assert text.startswith("Explanation of TwoLayers: 2 units, 4 replicas of world size 8, 1 frame")
    assert "2 all_reduce" in text  # in a line below the others
    assert exit_status("explain", "my_module:build", "--world-size", "4x") == 2
    assert "must be a number of ranks, or replicas x shards such as 4x8, got '4x'" in capsys.readouterr().err


def test_explain_estimates_for_the_hardware_of_a_file(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = dataclasses.replace(BUILTIN["h100"], name="slow link", link_latency=1.0)
    (target / "slow.json").write_text(spec.to_json())
    argv = ("explain", "my_module:build", "--world-size", "64", "--lower", "eager", "--hardware", "slow.json")
    assert exit_status(*argv) == 0
    text = capsys.readouterr().out
    assert "times are estimates for slow link (slow.json)" in text
    # Two gathers; a gather and two reductions.
    assert re.findall(r"no schedule can beat +(\S+ \S+)", text) == ["2 s", "3 s"]


def test_a_narrow_terminal_gets_the_summary_and_the_schedules(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "open_console", lambda: Console(force_terminal=True, width=100, color_system=None))
    assert exit_status("explain", "my_module:build", "--world-size", "64", "--lower", "eager") == 0
    text = capsys.readouterr().out
    assert text.startswith("Explanation of TwoLayers: 2 units, world size 64, 1 frame\n  dynamo ")
    assert text.count("no schedule can beat") == 2
    assert max(map(len, text.splitlines()[7:])) <= 100


def test_explain_prints_the_graphs_after_a_pass(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("explain", "my_module:one_input", "--world-size", "64", "--lower", "eager", "--pass", "insert_collectives")
    assert exit_status(*argv) == 0
    text = capsys.readouterr().out
    assert text.startswith("# forward, after InsertCollectives()\n%")
    assert "# backward, after" in text
    assert exit_status(*argv, "--stage", "backward", "--frame", "0") == 0
    text = capsys.readouterr().out
    assert text.startswith("# backward, after InsertCollectives()\n%")
    assert "# forward, after" not in text


def test_explain_writes_a_page(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        exit_status("explain", "my_module:build", "--world-size", "2", "--lower", "eager", "--html", "page.html") == 0
    )
    assert (target / "page.html").read_text().startswith("<!doctype html>")
    assert capsys.readouterr().err.endswith("wrote page.html\n")


def test_explain_takes_a_model_alone_if_it_needs_no_inputs(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("explain", "my_module:NoInputs", "--world-size", "2", "--lower", "eager") == 0
    assert "Explanation of NoInputs: 1 unit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("my_module",), "'my_module' names no function; write MODULE:FUNCTION, such as my_module:build."),
        (("my_modul:build",), "there is no module 'my_modul': it is neither installed nor in the current directory."),
        (("my_module:biuld",), "my_module has no 'biuld'."),
        (("my_module:number",), "my_module:number is no function but int; write one without parameters: return (model"),
        (("my_module:needing",), "my_module:needing is called without arguments, but it needs size."),
        (("my_module:wrong",), "my_module:wrong returned (Tensor, TwoLayers); return (model, args) or (model, args, "),
        (("my_module:wrong_names",), "my_module:wrong_names returned (TwoLayers, tuple, list); kwargs must be a dict"),
        (("my_module:alone",), "returned the model alone, but TwoLayers.forward needs x; return (model, args) or"),
        (("my_module:build",), "explain needs to know over how many ranks to shard"),
        (("my_module:build", "--world-size", "2", "--hardware", "h10"), "did you mean 'h100'?"),
        (("my_module:build", "--stage", "forward"), "--stage and --frame choose among the graphs that --pass NAME"),
        (
            ("my_module:build", "--world-size", "2", "--lower", "eager", "--pass", "insert"),
            "there is no pass 'insert'. Did you mean 'insert_collectives'? There are: captured, refuse_writes, ",
        ),
    ],
)
def test_explain_says_what_is_wrong_and_what_to_do(
    argv: tuple[str, ...], message: str, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status("explain", *argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("fxshard: ")
    assert message in error


def test_explain_leaves_errors_of_the_users_code_as_they_are(target: Path) -> None:
    with pytest.raises(LookupError, match="no such size"):
        exit_status("explain", "my_module:failing", "--world-size", "2")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        exit_status("explain", "needy:build", "--world-size", "2")


def _raise(error: BaseException) -> object:
    def run(*_: object) -> int:
        raise error

    return run


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
    spec = hardware.load(out)
    assert spec.source.startswith(f"{out}, measured on 2 ranks of fxshard_gloo, ")
    sides, shares = zip(*spec.gemm_efficiency, strict=True)
    assert sides[:2] == (128, 256)
    assert max(shares) == 1.0
    assert spec.host_bandwidth > 1e8
    lines = ["kernels", *(f"products, {name}" for name in ("bf16", "f16", "f32", "f64")), "copies", "links"]
    assert [line for line in done.stderr.splitlines() if line in lines] == lines
    argv = ("plan", "tests.plan.models:build", "--world-size", "2", "--schedule", "FSDP2", "--hardware", str(out))
    assert exit_status(*argv) == 0


@pytest.mark.commands
def test_a_mesh_with_replicas_has_a_file_of_its_own(tmp_path: Path) -> None:
    done = calibrate("--replicas", "2", cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (kept,) = tmp_path.rglob("*.json")
    assert kept.name.startswith("cpu-2x1-of-2-")
    done = calibrate("--replicas", "3", cache=tmp_path)
    assert "--replicas 3 does not divide the 2 ranks" in done.stderr
