"""`fxshard state merge`: one safetensors file with every bit of a sharded checkpoint."""

from __future__ import annotations

import builtins
import gc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import fxshard
from fxshard.errors import CheckpointError, ConfigError, MissingExtraError
from fxshard.state.merge import merge
from fxshard.tools import cli
from tests.numerics.models import MLP
from tests.state import bodies, processes
from tests.state.bodies import build
from tests.state.states import assert_same


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))  # a file has an order of its own


def state(*argv: str) -> int:
    return cli.main(["state", *argv])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of two ranks with tied parameters, and its state in full."""
    path = tmp_path_factory.mktemp("saved") / "a"
    return path, processes.run(2, save_tied, str(path))[0]


def save_tied(path: str) -> dict[str, Any]:
    model, optim = build("tied")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optim.step()
    fxshard.save_checkpoint(path, model, optim, extra=1)
    return bodies.state_of(model, optim)


def save_with_torch(path: str, flat: bool) -> dict[str, Any]:
    model, _ = build("uneven")
    weights = model.state_dict()
    dcp.save(weights if flat else {"weights": weights, "step": 3}, checkpoint_id=path)
    return bodies.state_of(model)


@pytest.mark.multi_rank
def test_the_model_stands_under_its_own_names(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, expected = saved
    out = tmp_path / "out.safetensors"
    assert state("merge", str(path), str(out)) == 0
    found = load_file(out)
    assert_same_tensors(found, dict(expected["model"]))
    assert torch.equal(found["embed.weight"], found["head.weight"])  # both names of what is tied
    plain, _ = build("tied", "unsharded", seed=1)
    plain.load_state_dict(found)
    assert_same(bodies.state_of(plain)["model"], expected["model"])
    assert os.listdir(tmp_path) == ["out.safetensors"]
    printed = capsys.readouterr()
    assert f"wrote {out}: {len(found)} tensors, " in printed.out
    assert "left out optim (" in printed.out
    assert " values): beside the model (--all adds it)" in printed.out
    assert "left out extra.pt: it is read by torch.load" in printed.out
    assert printed.err == ""  # no progress without a terminal


@pytest.mark.multi_rank
def test_all_adds_the_optimizer(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, expected = saved
    out = tmp_path / "out.safetensors"
    assert state("merge", "--all", str(path), str(out)) == 0
    found = load_file(out)
    optimizer = {
        f"optim.state.{fqn}.{name}": value for fqn, each in expected["state"].items() for name, value in each.items()
    }
    assert_same_tensors(found, {**expected["model"], **optimizer})
    with safe_open(out, "pt") as file:
        texts = file.metadata()
    assert texts["format"] == "pt"
    assert json.loads(texts["optim.param_groups.0.lr"]) == 1e-2
    assert json.loads(texts["optim.param_groups.1.params"]) == expected["groups"][1]["params"]


@pytest.mark.multi_rank
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
def test_a_checkpoint_of_torch_keeps_its_keys(flat: bool, tmp_path: Path) -> None:
    expected = processes.run(2, save_with_torch, str(tmp_path / "a"), flat)[0]["model"]
    assert state("merge", str(tmp_path / "a"), str(tmp_path / "out.safetensors")) == 0
    prefix = "" if flat else "weights."
    assert_same_tensors(
        load_file(tmp_path / "out.safetensors"), {prefix + fqn: value for fqn, value in expected.items()}
    )


class Inner(nn.Module):
    """A model whose own module is called model, as those of Hugging Face are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MLP()
        self.lm_head = nn.Linear(2, 3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_module_called_model_is_not_taken_for_the_entry(tmp_path: Path) -> None:
    module = Inner()
    dcp.save(module.state_dict(), checkpoint_id=tmp_path / "a")
    merge(tmp_path / "a", tmp_path / "out")
    assert_same_tensors(load_file(tmp_path / "out"), dict(module.state_dict()))


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64),
]


class EveryDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i, dtype in enumerate(DTYPES):
            self.register_buffer(f"x{i}", torch.arange(2 * i).reshape(i, 2).to(dtype))
        self.register_buffer("scalar", torch.tensor(1.5))


def test_keeps_every_dtype_and_shape(tmp_path: Path) -> None:
    model = EveryDtype()
    fxshard.save_checkpoint(tmp_path / "a", model)
    merge(tmp_path / "a", tmp_path / "out")
    found = load_file(tmp_path / "out")
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name


def test_reports_progress_in_bytes(tmp_path: Path) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP())
    seen: list[tuple[int, int]] = []
    merge(tmp_path / "a", tmp_path / "out", on_progress=lambda done, total: seen.append((done, total)))
    total = sum(p.nbytes for p in MLP().parameters())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_damaged_checkpoint_gives_no_file(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP())
    file = tmp_path / "a" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    if damage == "missing":
        file.unlink()
    assert state("merge", str(tmp_path / "a"), str(tmp_path / "out")) == 2
    assert "__0_0.distcp is " in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_missing_file_of_torchs_checkpoint_is_named_with_its_key(tmp_path: Path) -> None:
    dcp.save({"weights": MLP().state_dict()}, checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"weights\..* in .*__0_0.distcp.* cannot be read: FileNotFoundError"):
        merge(tmp_path / "a", tmp_path / "out")
    assert os.listdir(tmp_path) == ["a"]


def test_says_what_cannot_be_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP())
    (tmp_path / "out").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for arguments, kind, message in (
        (("a", "out"), ConfigError, "out exists"),
        (("a", "no/out"), ConfigError, "there is no folder"),
        (("a", "other"), ConfigError, "other is a folder"),
        (("nothing", "new"), CheckpointError, "there is no checkpoint at"),
        (("other", "new"), CheckpointError, "is not a sharded checkpoint: it has no file .metadata"),
    ):
        with pytest.raises(kind, match=message):
            merge(*(tmp_path / name for name in arguments))
    assert (tmp_path / "out").read_text() == "mine"
    fxshard.save_checkpoint(tmp_path / "c", nn.ParameterList([torch.zeros(2, dtype=torch.complex128)]))
    with pytest.raises(CheckpointError, match=r"no name for the dtype of: model.0 \(torch.complex128\)"):
        merge(tmp_path / "c", tmp_path / "new")
    merge(tmp_path / "a", tmp_path / "out", overwrite=True)
    assert len(load_file(tmp_path / "out")) == len(list(MLP().parameters()))
    import_ = builtins.__import__

    def without_safetensors(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return import_(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_safetensors)
    with pytest.raises(MissingExtraError, match=r"fxshard\[state\]"):
        merge(tmp_path / "a", tmp_path / "new")


def test_nothing_is_written_into_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a"
    fxshard.save_checkpoint(path, MLP())
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "file").symlink_to(path / "__0_0.distcp")
    before = {each: each.read_bytes() for each in path.iterdir()}
    for out in (path / "out", tmp_path / "link" / "out", path / "__0_0.distcp", path / ".metadata", tmp_path / "file"):
        with pytest.raises(ConfigError, match=f"{out.name} lies in the checkpoint"):
            merge(path, out, overwrite=True)
    assert {each: each.read_bytes() for each in path.iterdir()} == before
    path.rename(former := tmp_path / "a.fxshard-former")
    with pytest.raises(ConfigError, match="lies in the checkpoint"):
        merge(path, former / "out")
    merge(path, tmp_path / "out")
    fxshard.save_checkpoint(path, MLP())


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP())
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "out").write_text("mine")
    for name in ("out", "new"):
        (tmp_path / name).symlink_to(tmp_path / "there" / name)
    with pytest.raises(ConfigError, match="out exists"):
        merge(tmp_path / "a", tmp_path / "out")
    for name in ("out", "new"):
        merge(tmp_path / "a", tmp_path / name, overwrite=name == "out")
        assert (tmp_path / name).is_symlink()
        assert len(load_file(tmp_path / "there" / name)) == len(list(MLP().parameters()))
    assert sorted(each.name for each in (tmp_path / "there").iterdir()) == ["new", "out"]


@pytest.mark.slow
def test_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ParameterList([torch.randn(2**14) for _ in range(8)])
    fxshard.save_checkpoint(tmp_path / "a", model)
    alive: list[int] = []
    empty = torch.empty

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:

        found = empty(*args, **kwargs)
        alive.append(sum(type(each) is torch.Tensor and each.shape == (2**14,) for each in gc.get_objects()))
        return found

    monkeypatch.setattr(torch, "empty", counted)
    merge(tmp_path / "a", tmp_path / "out")
    assert len(alive) >= 8
    assert max(alive) <= 4


def test_an_interrupted_merge_leaves_nothing(tmp_path: Path) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP())

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(tmp_path / "a", tmp_path / "out", on_progress=interrupt)
    assert os.listdir(tmp_path) == ["a"]


def test_what_cannot_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP())
    (tmp_path / "out").write_text("mine")

    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            assert state("merge", "--overwrite", str(tmp_path / "a"), str(tmp_path / "out")) == 2
        assert "out could not be written ([Errno 13] Permission denied)" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["a", "out"]
    assert (tmp_path / "out").read_text() == "mine"


def test_two_merges_at_a_time_do_not_meet(tmp_path: Path) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP())
    once: list[int] = []

    def again(done: int, total: int) -> None:
        if not once:
            once.append(done)
            merge(tmp_path / "a", tmp_path / "out")

    merge(tmp_path / "a", tmp_path / "out", on_progress=again)
    assert len(load_file(tmp_path / "out")) == len(list(MLP().parameters()))
    assert sorted(os.listdir(tmp_path)) == ["a", "out"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_all_that_is_left_out_is_listed_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"format": "mine", "odd": {1, 2}, "object": Counted, "step": 3, "w": torch.ones(3)}
    dcp.save(values, checkpoint_id=tmp_path / "a")
    assert state("merge", str(tmp_path / "a"), str(tmp_path / "out")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "left out format: safetensors has that name for itself" in lines
    assert "left out odd: JSON has no form for it" in lines
    assert any(line.startswith(f"left out object: object in {tmp_path}") for line in lines)
    with safe_open(tmp_path / "out", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3"}


class Counted:
    """A class of the user's."""


def test_help_explains_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        state("merge", "--help")
    text = capsys.readouterr().out
    for word in ("CKPT", "OUT", "--all", "--overwrite"):
        assert word in text
