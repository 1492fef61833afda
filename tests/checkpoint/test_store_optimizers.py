"""What optimizers keep beside the state of their parameters: options that are tensors, and what they add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
