"""The command line: help, versions and errors; what the commands do is tested with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxshard import cli
from fxshard.errors import ConfigError


def exit_status(*argv: str) -> int:
    try:
        return cli.main(argv)
    except SystemExit as ended:  # argparse's own way
        return int(ended.code or 0)


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--version") == 0
    assert capsys.readouterr().out.startswith("fxshard ")


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--help") == 0
    assert "demo" in capsys.readouterr().out


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status() == 2
    assert "COMMAND" in capsys.readouterr().err


def test_help_of_demo_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("demo", "--help") == 0
    text = capsys.readouterr().out
    subparsers = cli._parser()._subparsers
    assert subparsers is not None
    (choices,) = (action.choices for action in subparsers._group_actions)
    assert isinstance(choices, dict)
    for action in choices["demo"]._actions:
        assert action.help, action.dest
        assert action.option_strings[-1] in text


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
    monkeypatch.setattr("fxshard.demo.run.run_demo", _raise(ConfigError("seq_len must be smaller.")))
    assert exit_status("demo") == 2
    assert capsys.readouterr().err == "fxshard: seq_len must be smaller.\n"


def test_interrupting_is_not_an_error_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxshard.demo.run.run_demo", _raise(KeyboardInterrupt()))
    assert exit_status("demo") == 130
    assert capsys.readouterr().err == "fxshard: interrupted\n"


def test_an_output_folder_that_cannot_be_made_is_a_clear_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert exit_status("demo", "--out", str(tmp_path / "file")) == 2
    assert "cannot be used as a folder" in capsys.readouterr().err


def test_more_ranks_than_gpus_is_a_clear_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert exit_status("demo", "--ranks", "2") == 2
    assert "--ranks 2 needs 2 GPUs, and there are 1" in capsys.readouterr().err


def test_asking_for_cuda_without_a_gpu_is_a_clear_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert exit_status("demo", "--device", "cuda") == 2
    assert "--device cuda needs a GPU" in capsys.readouterr().err


def _raise(error: BaseException) -> object:
    def run(*_: object) -> int:
        raise error

    return run
