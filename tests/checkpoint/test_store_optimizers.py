"""What optimizers keep beside the state of their parameters: options that are tensors, and what they add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import fxshard
from fxshard.errors import ConfigError
from tests.checkpoint.bodies import build
from tests.checkpoint.helpers import shared_folder
from tests.ranks import two_ranks


class Adds(torch.optim.SGD):
    """Has something beside its state."""

    added: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "added": self.added}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.added = state_dict["added"]
        super().load_state_dict(state_dict)


@two_ranks
@pytest.mark.parametrize("where", ["option", "addition"])
def test_sharded_tensors_that_belong_to_no_parameter_are_refused(where: str) -> None:
    model, _ = build()
    optim = Adds(model.parameters(), lr=0.1)
    sharded = distribute_tensor(torch.ones(4), next(model.parameters()).device_mesh, [Shard(0)])  # type: ignore[attr-defined]
    if where == "option":
        optim.param_groups[0]["kept"] = {"inside": sharded}
    else:
        optim.added = sharded
    name = r"param_groups.0.kept.inside\." if where == "option" else r"added\."
    with shared_folder() as folder, pytest.raises(ConfigError, match=f"that belong to no parameter: {name}"):
        fxshard.save_checkpoint(folder / "a", model, optim)


def two_groups(model: nn.Linear, rate: float, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of weight and bias, which share the tensor of the rate unless `options` has another."""
    groups = [{"params": [model.weight]}, {"params": [model.bias], **options}]
    return torch.optim.AdamW(groups, lr=torch.tensor(rate), foreach=False)


def test_groups_that_share_a_tensor_part_where_they_load_different_values(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    fxshard.save_checkpoint(tmp_path / "a", model, two_groups(model, 0.1, lr=torch.tensor(0.2)))
    optim = two_groups(model, 0.5)
    fxshard.load_checkpoint(tmp_path / "a", model, optim)
    assert [float(group["lr"]) for group in optim.param_groups] == pytest.approx([0.1, 0.2])


def test_groups_share_a_tensor_still_where_they_load_the_same_value(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    fxshard.save_checkpoint(tmp_path / "a", model, two_groups(model, 0.1))
    optim = two_groups(model, 0.5)
    shared = optim.param_groups[0]["lr"]
    fxshard.load_checkpoint(tmp_path / "a", model, optim)
    assert all(group["lr"] is shared for group in optim.param_groups)
    assert float(shared) == pytest.approx(0.1)


def test_parameters_that_share_state_part_where_they_load_different_values(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optim, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    shared = torch.zeros(())
    for count, parameter in enumerate(model.parameters()):
        optim.state[parameter] = {"step": torch.tensor(float(count))}
        other.state[parameter] = {"step": shared}
    fxshard.save_checkpoint(tmp_path / "a", model, optim)
    fxshard.load_checkpoint(tmp_path / "a", model, other)
    assert [float(other.state[parameter]["step"]) for parameter in model.parameters()] == [0.0, 1.0]
