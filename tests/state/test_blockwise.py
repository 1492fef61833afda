"""State in tensor subclasses, as 8-bit optimizers keep it, is refused by name before anything is sent or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fxshard
from fxshard import ConfigError
from tests.ranks import group_folder, two_ranks


class Codes(Tensor):
    """Integers and one scale, as torchao's OptimState8bit has one for each block."""

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
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            given: Any = args[0]
            return cls(func(given.codes, *args[1:]), given.scale)
        raise NotImplementedError(f"{func} of {cls.__name__}")


class EightBit(torch.optim.SGD):
    """Keeps the sum of gradients in few bits."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            rows = parameter.grad.to_local()
            scale = rows.abs().max() / 127
            kept = Codes((rows / scale).to(torch.int8), scale)
            self.state[parameter]["sum"] = DTensor.from_local(
                kept,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )


def trained(steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fxshard.fully_shard(model)
    optim = EightBit(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).square().mean().backward()
        optim.step()
    return model, optim


def save(folder: Path) -> None:
    fxshard.save_checkpoint(folder / "refused", *trained())


def load(folder: Path) -> None:
    fxshard.save_checkpoint(folder / "plain", *trained(0))
    fxshard.load_checkpoint(folder / "plain", *trained())


def gather(folder: Path) -> None:
    fxshard.full_optim_state_dict(*trained())


def load_full(folder: Path) -> None:
    model, optim = trained()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    fxshard.load_full_optim_state_dict(model, optim, fxshard.full_optim_state_dict(model, plain, recipient_rank=None))


@two_ranks
@pytest.mark.parametrize("act", [save, load, gather, load_full])
def test_is_refused_by_name_on_every_rank(act: Callable[[Path], None]) -> None:
    folder = group_folder()
    message = (
        r"keeps tensor subclasses.*0.weight: sum is a Codes; 0.bias: sum is a Codes.*torch.distributed.checkpoint and"
    )
    with pytest.raises(ConfigError, match=message):
        act(folder)
    assert not (folder / "refused").exists()
