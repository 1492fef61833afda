"""What cannot be saved or loaded is an error on every rank, which names it and leaves everything as it was."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import fxshard
from fxshard.errors import CheckpointError, ConfigError
from fxshard.state import checkpoint, manifest
from tests.numerics.models import GPT, MLP
from tests.ranks import two_ranks
from tests.state.bodies import adamw, build, train
from tests.state.helpers import on_rank_0, require_refusal, shared_folder

# ---- damaged files


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "bytes, expected"),
    "flipped": (flip_a_bit, "is damaged: its SHA-256 is"),
    "missing": (Path.unlink, "is missing"),
}


@two_ranks
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_with_what_it_holds(damage: str) -> None:
    model, optim = build()
    train(model, optim, range(1))
    break_, message = DAMAGES[damage]
    for file in ("__0_0.distcp", "__1_0.distcp", ".metadata", "extra.pt"):
        with shared_folder() as folder:
            path = folder / "a"
            fxshard.save_checkpoint(path, model, optim, extra=1)
            on_rank_0(functools.partial(break_, path / file))
            holds = ["it holds model.blocks.0.norm.weight", "more"] if file.endswith(".distcp") else []
            require_refusal(path, *build(seed=1), CheckpointError, str(path), file, message, *holds)
            train(model, optim, range(1, 2))
            require_refusal(path, model, optim, CheckpointError, file)


@two_ranks
def test_all_damaged_files_are_named() -> None:
    model, optim = build()
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim)
        on_rank_0(lambda: flip_a_bit(folder / "a" / ".metadata"))
        on_rank_0(lambda: truncate(folder / "a" / "__1_0.distcp"))
        require_refusal(folder / "a", model, optim, CheckpointError, "is damaged", "rank")


@two_ranks
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_manifest_is_named(damage: str) -> None:
    model, optim = build()
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim)
        on_rank_0(lambda: DAMAGES[damage][0](folder / "a" / "fxshard.json"))
        require_refusal(folder / "a", model, optim, CheckpointError, "fxshard.json is damaged")
        fxshard.save_checkpoint(folder / "a", model, optim, extra=2)  # and does not stand in the way
        assert fxshard.load_checkpoint(folder / "a", model, optim) == 2


def rewrite_manifest(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "fxshard.json"
    body = {**json.loads(path.read_text()), **changes}
    body.pop("sha256")
    path.write_text(json.dumps({**body, "sha256": manifest._digest(body)}))


def test_a_manifest_of_a_later_release_is_refused(tmp_path: Path) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP())
    rewrite_manifest(tmp_path / "a", {"version": 2})
    with pytest.raises(CheckpointError, match=r"has version 2 .* reads version 1"):
        fxshard.load_checkpoint(tmp_path / "a", MLP())


def test_an_index_that_this_torch_cannot_read_names_the_torch_that_wrote_it(tmp_path: Path) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP())
    (tmp_path / "a" / ".metadata").write_bytes(b"of a torch to come")
    entry = dataclasses.asdict(manifest.FileEntry.of(tmp_path / "a" / ".metadata"))
    rewrite_manifest(tmp_path / "a", {"torch": "3.0.0", "files": {".metadata": entry}})
    with pytest.raises(CheckpointError, match=r"metadata cannot be read: .* It was written by 3.0.0, and this is"):
        fxshard.load_checkpoint(tmp_path / "a", MLP())


def test_rows_that_no_file_holds_are_missed(tmp_path: Path) -> None:
    fxshard.save_checkpoint(tmp_path / "a", MLP())
    index = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    index.state_dict_metadata["model.head.bias"].chunks.clear()
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(index))
    entries = {path.name: manifest.FileEntry.of(path) for path in (tmp_path / "a").glob("[._]*")}
    rewrite_manifest(tmp_path / "a", {"files": {name: dataclasses.asdict(entry) for name, entry in entries.items()}})
    with pytest.raises(CheckpointError, match=r"holds 0 of 12 elements of model.head.bias: a part"):
        fxshard.load_checkpoint(tmp_path / "a", MLP())


@two_ranks
def test_units_on_several_sets_of_ranks_are_refused() -> None:
    model = MLP()
    fxshard.fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
    fxshard.fully_shard(model)
    with shared_folder() as folder, pytest.raises(ConfigError, match=r"several: .* on \[0\], .* on \[0, 1\]\. Save"):
        fxshard.save_checkpoint(folder / "a", model)


def test_files_that_rank_0_does_not_see_are_named(tmp_path: Path) -> None:
    (tmp_path / "saving").mkdir()
    entry = manifest.FileEntry(size=0, sha256="")
    unseen = manifest.Manifest(files={"__1_0.distcp": entry}, world_size=2, torch="")
    with pytest.raises(ConfigError, match=r"rank 0 does not see __1_0.distcp in .*saving"):
        checkpoint._finish(tmp_path / "saving", tmp_path / "a", unseen)


@pytest.mark.parametrize("what", ["nothing", "empty", "torch's"])
def test_what_is_no_checkpoint_is_refused(what: str, tmp_path: Path) -> None:
    if what != "nothing":
        (tmp_path / "a").mkdir()
    if what == "torch's":
        (tmp_path / "a" / ".metadata").touch()
    message = "has no fxshard.json" if what == "torch's" else "there is no checkpoint at"
    with pytest.raises(CheckpointError, match=message):
        fxshard.load_checkpoint(tmp_path / "a", MLP())


# ---- what does not fit


class Wider(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 13)


class Renamed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.tail = self.head
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        return x


def another(make: Callable[[], nn.Module]) -> tuple[nn.Module, Optimizer]:
    model = fxshard.fully_shard(make())
    return model, torch.optim.AdamW(model.parameters())


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "shape": (Wider, ["head.weight is torch.float32[12, 12] (__0_", "expected torch.float32[13, 12]", "head.bias"]),
    "dtype": (
        lambda: MLP().double(),
        ["blocks.0.norm.weight is torch.float32[12] (__0_", "expected torch.float64[12]"],
    ),
    "key": (Renamed, ["it lacks tail.weight, tail.bias", "it has head.weight (__0_", "which the model does not have"]),
}


@two_ranks
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_does_not_fit_is_refused_with_all_that_differs(name: str) -> None:
    make, messages = MODELS[name]
    model, optim = build()
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim)
        require_refusal(folder / "a", another(make)[0], None, CheckpointError, *messages, "distcp")


def with_state(of: Callable[[nn.Parameter], dict[str, Any]]) -> Callable[[nn.Module], Optimizer]:
    """Make the optimizer that was saved, with this state for each parameter."""

    def make(model: nn.Module) -> Optimizer:
        optim = adamw(model)
        optim.state.update({p: of(p) for p in model.parameters()})
        return optim

    return make


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Optimizer], list[str]]] = {
    "groups": (
        lambda model: torch.optim.AdamW(model.parameters()),
        ["its param_groups hold [[", "those of the optimizer [['blocks.0.norm.weight'"],
    ),
    "class": (
        lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
        ["the state of AdamW", "optim is SGD"],
    ),
    "names": (
        with_state(lambda p: {"exp_max": torch.zeros_like(p)}),
        ["state of blocks.0.up.weight has ['exp_avg', 'exp_avg_sq', 'step'], expected ['exp_max']"],
    ),
    "shapes": (
        with_state(lambda p: {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "step": torch.tensor(0.0)}),
        ["state of head.weight: exp_avg is torch.float32[12, 12] (__0_", "expected torch.float32[3]"],
    ),
}


@two_ranks
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_does_not_fit_is_refused(name: str) -> None:
    make, messages = OPTIMIZERS[name]
    model, optim = build()
    train(model, optim, range(1))
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim)
        other, _ = build(seed=1)
        require_refusal(folder / "a", other, make(other), CheckpointError, str(folder / "a"), *messages)


@two_ranks
def test_a_checkpoint_of_the_model_alone_has_nothing_for_an_optimizer() -> None:
    model, _ = build()
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model)
        require_refusal(folder / "a", *build(seed=1), CheckpointError, "holds no optimizer")


@two_ranks
def test_several_values_for_tied_parameters_are_refused() -> None:
    model, _ = build("tied")
    untied = fxshard.fully_shard(GPT())
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", untied)
        messages = ("embed.weight and head.weight are one parameter (tied)", "it has different values")
        require_refusal(folder / "a", model, None, CheckpointError, *messages)


# ---- what cannot be saved


def unfit(work: Callable[[nn.Module, Optimizer, Path], Any], path: Path) -> str:
    model, optim = build("mlp", "unsharded")
    with pytest.raises(ConfigError) as caught:
        work(model, optim, path)
    return str(caught.value)


def test_says_what_a_checkpoint_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def save(**kwargs: Any) -> Callable[[nn.Module, Optimizer, Path], Any]:
        return lambda model, optim, path: fxshard.save_checkpoint(path, model, optim, **kwargs)

    class Path_(type(path)):  # type: ignore[misc]
        pass

    message = unfit(save(extra={"best": [1, {"run": Path_("x")}]}), path)
    assert message.startswith("extra['best'][1]['run'] is a tests.state.test_checkpoint_refusals.")
    assert "which a checkpoint cannot hold" in message
    assert not path.exists()

    def with_state(value: Any) -> Callable[[nn.Module, Optimizer, Path], Any]:
        def work(model: nn.Module, optim: Optimizer, path: Path) -> None:
            optim.state[next(model.parameters())] = {"x": value}
            fxshard.save_checkpoint(path, model, optim)

        return work

    assert "state of blocks.0.norm.weight['x'] is a builtins.object" in unfit(with_state(object()), path)

    def with_option(model: nn.Module, optim: Optimizer, path: Path) -> None:
        optim.param_groups[1][7] = "x"  # type: ignore[index]
        fxshard.save_checkpoint(path, model, optim)

    def with_number(model: nn.Module, optim: Optimizer, path: Path) -> None:
        optim.state[next(model.parameters())] = {1: 2}
        fxshard.save_checkpoint(path, model, optim)

    assert "param_groups[1] has keys that are not strings, which" in unfit(with_option, path)
    assert "state of blocks.0.norm.weight has keys that are not strings, which" in unfit(with_number, path)


def test_refuses_arguments_of_other_kinds(tmp_path: Path) -> None:
    model, optim = build("mlp", "unsharded")
    other, odd = build("mlp", "unsharded")
    cast("dict[Any, Any]", odd.state)["calls"] = 3
    calls: dict[str, Callable[[], Any]] = {
        "path must be": lambda: fxshard.save_checkpoint(3, model),  # type: ignore[arg-type]
        "path must be the": lambda: fxshard.load_checkpoint("", model),
        "an nn.Module, got int": lambda: fxshard.save_checkpoint(tmp_path, 3),  # type: ignore[arg-type]
        "optim must be": lambda: fxshard.save_checkpoint(tmp_path, model, [optim]),  # type: ignore[arg-type]
        "not in the model: param_groups[0]['params'][0] of": lambda: fxshard.save_checkpoint(tmp_path, MLP(), optim),
        "keys that are not parameters: ['calls']": lambda: fxshard.save_checkpoint(tmp_path, other, odd),
        "on the meta device": lambda: fxshard.load_checkpoint(tmp_path, MLP().to("meta")),
    }
    for message, call in calls.items():
        with pytest.raises(ConfigError) as caught:
            call()
        assert message in str(caught.value)


def test_refuses_values_that_have_no_form_in_a_file(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for value in (torch.eye(2).to_sparse(), np.longdouble(1)):
        with pytest.raises(ConfigError, match=r"extra is a .*, which a checkpoint cannot hold"):
            fxshard.save_checkpoint(tmp_path / "a", model, extra=value)
    model.register_buffer("table", torch.eye(2).to_sparse())
    with pytest.raises(ConfigError, match=r"table is a torch.Tensor, which a checkpoint cannot hold: .* dense tensors"):
        fxshard.save_checkpoint(tmp_path / "a", model)


def test_does_not_replace_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for path in (".", "..", tmp_path):
        with pytest.raises(ConfigError, match="is the working folder or holds it"):
            fxshard.save_checkpoint(path, MLP())
    fxshard.save_checkpoint("a", MLP())
    monkeypatch.chdir("a")
    fxshard.load_checkpoint(".", MLP())


def test_does_not_touch_folders_of_others(tmp_path: Path) -> None:
    for name in ("notes", "torch", "a"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    (tmp_path / "torch" / ".metadata").touch()
    (tmp_path / "file").touch()
    fxshard.save_checkpoint(tmp_path / "a", MLP())
    (tmp_path / "a" / "README").touch()
    (tmp_path / "b.fxshard-former").mkdir()
    (tmp_path / "b.fxshard-former" / "photo.jpg").touch()
    for name, message in {
        "notes": "notes holds todo.txt: fxshard.save_checkpoint did not write that",
        "torch": "torch has no fxshard.json",
        "a": "a holds README",
        "b": "b.fxshard-former holds photo.jpg",
        "file": "file is a file; a checkpoint is a folder",
    }.items():
        before = sorted(str(path) for path in tmp_path.rglob("*"))
        with pytest.raises(ConfigError) as caught:
            fxshard.save_checkpoint(tmp_path / name, MLP())
        assert message in str(caught.value)
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@two_ranks
def test_a_save_that_fails_leaves_the_former_checkpoint_and_nothing_else() -> None:
    model, optim = build()
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim, extra=1)
        write = Path.open

        def full(self: Path, *args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == 1 and self.name == "__1_0.distcp" and args[:1] == ("wb",):
                raise OSError(28, "No space left on device", str(self))
            return write(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "open", full)
            with pytest.raises(CheckpointError, match=r"could not be written: rank 1: .*No space left on device"):
                fxshard.save_checkpoint(folder / "a", model, optim, extra=2)
        dist.barrier()
        assert [entry.name for entry in folder.iterdir()] == ["a"]
        assert fxshard.load_checkpoint(folder / "a", model, optim) == 1
