"""State in tensor subclasses, as 8-bit optimizers keep it: the same bits in checkpoints and full state, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torchao.optim as optim8
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard

import fxshard
from fxshard import CheckpointError, ConfigError
from fxshard.runtime.parameters import local_of
from fxshard.state import subclasses
from tests.ranks import group_folder, two_ranks


def built(kind: str = "AdamW8bit", features: int = 128, *, sharded: bool = True) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, features), nn.Tanh(), nn.Linear(features, 64))
    if sharded:
        fxshard.fully_shard(model)
    return model, getattr(optim8, kind)(model.parameters(), lr=1e-3)


def train(model: nn.Module, optim: Any, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed + step))
        model(data).square().mean().backward()
        with torch.compiler.set_stance("force_eager"):  # torchao compiles it
            optim.step()
        optim.zero_grad()


def bits(optim: Any) -> list[Tensor]:
    found = []
    for state in optim.state.values():
        for value in state.values():
            local: Any = local_of(value) if isinstance(value, DTensor) else value
            names = local.__tensor_flatten__()[0] if hasattr(local, "block_size") else ()
            found += [getattr(local, name).clone() for name in names] or [torch.as_tensor(local).clone()]
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def by_checkpoint(folder: Path, source: tuple[nn.Module, Any], target: tuple[nn.Module, Any]) -> None:
    fxshard.save_checkpoint(folder / "saved", *source)
    fxshard.load_checkpoint(folder / "saved", *target)


def by_full_state(folder: Path, source: tuple[nn.Module, Any], target: tuple[nn.Module, Any]) -> None:
    fxshard.load_full_state_dict(target[0], fxshard.full_state_dict(source[0]))
    fxshard.load_full_optim_state_dict(*target, fxshard.full_optim_state_dict(*source))


@two_ranks
@pytest.mark.parametrize("way", [by_checkpoint, by_full_state])
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamWFp8"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_every_part_comes_back_to_the_bit(way: Callable[..., None], kind: str, steps_before: int) -> None:
    source, target = built(kind), built(kind)
    train(*source, 2)
    train(*target, steps_before, seed=50)
    way(group_folder(), source, target)
    assert any(hasattr(local_of(each["exp_avg"]), "block_size") for each in target[1].state.values())
    assert same(bits(source[1]), bits(target[1]))
    train(*source, 2, seed=10)
    train(*target, 2, seed=10)
    assert same(bits(source[1]), bits(target[1]))
    assert all(
        torch.equal(local_of(a), local_of(b))
        for a, b in zip(source[0].parameters(), target[0].parameters(), strict=True)
    )


@two_ranks
def test_full_state_is_that_of_torch_and_of_the_unsharded_optimizer() -> None:
    model, optim = built()
    train(model, optim, 2)
    full = fxshard.full_optim_state_dict(model, optim, recipient_rank=None)
    torchs: Any = get_optimizer_state_dict(model, optim, options=StateDictOptions(full_state_dict=True))["state"]
    assert full["state"][0]["exp_avg"].shape == (128, 64)
    for part in ("codes", "scale", "qmap"):
        ours = getattr(full["state"][0]["exp_avg"], part)
        assert torch.equal(ours, getattr(torchs["0.weight"]["exp_avg"], part))
    plain, unsharded = built(sharded=False)
    plain.load_state_dict(fxshard.full_state_dict(model, recipient_rank=None))
    unsharded.load_state_dict(full)
    other, sharded = built()
    fxshard.load_full_state_dict(other, plain.state_dict())
    fxshard.load_full_optim_state_dict(other, sharded, unsharded.state_dict())
    assert same(bits(optim), bits(sharded))


def write(folder: Path) -> None:
    source = built()
    train(*source, 2)
    fxshard.save_checkpoint(folder / "of two ranks", *source)
    full = fxshard.full_optim_state_dict(*source)
    torch.save(full["state"][0]["exp_avg"], folder / "expected.pt") if full else None


@two_ranks
def test_a_checkpoint_of_two_ranks_is_one_of_an_unsharded_model_and_back() -> None:
    folder = group_folder()
    write(folder)
    plain = built(sharded=False)
    fxshard.load_checkpoint(folder / "of two ranks", *plain)
    expected = torch.load(folder / "expected.pt", weights_only=False)
    assert torch.equal(plain[1].state[plain[0][0].weight]["exp_avg"].codes, expected.codes)  # type: ignore[index]
    assert torch.equal(plain[1].state[plain[0][0].weight]["exp_avg"].scale, expected.scale)  # type: ignore[index]


@two_ranks
def test_other_kinds_of_state_are_refused_before_anything_changes() -> None:
    folder = group_folder()
    eight, plain = built(), built()
    plain[1].block_size = 1 << 20  # no tensor has that many elements, so torchao keeps floats
    train(*eight, 1)
    train(*plain, 1)
    before = bits(eight[1])
    fxshard.save_checkpoint(folder / "plain", *plain)
    fxshard.save_checkpoint(folder / "eight", *eight)
    is_plain = r"state of 0.weight is kept in plain tensors, expected exp_avg: OptimState8bit"
    with pytest.raises(CheckpointError, match=is_plain):
        fxshard.load_checkpoint(folder / "plain", *eight)
    with pytest.raises(ConfigError, match=is_plain):
        fxshard.load_full_optim_state_dict(*eight, fxshard.full_optim_state_dict(*plain))
    is_eight = r"state of 0.weight is kept in exp_avg: OptimState8bit.*expected plain tensors"
    with pytest.raises(CheckpointError, match=is_eight):
        fxshard.load_checkpoint(folder / "eight", *plain)
    with pytest.raises(ConfigError, match=is_eight):
        fxshard.load_full_optim_state_dict(*plain, fxshard.full_optim_state_dict(*eight))
    assert same(before, bits(eight[1]))


@two_ranks
def test_blocks_that_end_inside_the_rows_of_a_rank_are_refused() -> None:
    plain = built(features=66, sharded=False)  # 4224 elements, 256 * 16.5: 8-bit only in blocks of 128
    plain[1].block_size = 128
    train(*plain, 1)
    target = built(features=66)
    with pytest.raises(ConfigError, match=r"the rows of this rank, 33 of 66, do not end where a block ends"):
        fxshard.load_full_optim_state_dict(*target, plain[1].state_dict())


@two_ranks
@pytest.mark.parametrize("call", ["checkpoint", "full"])
def test_a_class_that_keeps_its_shape_in_its_context_is_refused_by_name(call: str) -> None:
    folder = group_folder()
    source = built("AdamW4bit")
    train(*source, 1)
    with pytest.raises(ConfigError, match=r"state of 0.weight: exp_avg is a OptimState4bit, which fxshard cannot take"):
        fxshard.save_checkpoint(folder / "x", *source) if call == "checkpoint" else fxshard.full_optim_state_dict(
            *source
        )
    assert not (folder / "x").exists()


class Codes(Tensor):
    """Integers and one scale, without a rule for all_gather."""

    def __new__(cls: type[Codes], codes: Tensor, scale: Tensor) -> Codes:
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return cast(Codes, made)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: None, size: Any = None, stride: Any = None) -> Codes:
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of {cls.__name__}")


def test_a_class_without_a_rule_for_all_gather_is_refused_by_name() -> None:
    state = {"sum": Codes(torch.zeros(4, dtype=torch.int8), torch.ones(()))}
    with pytest.raises(ConfigError, match=r"state of w: sum is a Codes, .* it has no rule for all_gather \(NotImpl"):
        subclasses.flatten(state, "state of w")


def test_a_class_that_is_not_imported_is_named() -> None:
    described = {"class": "absent.Module", "context": None, "shape": [4], "cut": ["codes"]}
    with pytest.raises(
        ConfigError, match=r"state of w is a absent.Module, which is not imported. Import the optimizer"
    ):
        subclasses.unflatten({subclasses.KIND: described, "codes": torch.zeros(4)}, "state of w")


@two_ranks
def test_state_of_other_placements_is_refused() -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    state = optim8.subclass_8bit.OptimState8bit.zeros((4, 256))
    placed = DTensor.from_local(state, mesh, [Shard(1)], run_check=False)
    with pytest.raises(ConfigError, match=r"it is placed \(Shard\(dim=1\),\), not sharded by rows"):
        subclasses.flatten({"sum": placed}, "state of w")
