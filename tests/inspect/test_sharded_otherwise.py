"""Models whose parameters lie otherwise than usual are explained and bisected as others are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import fxshard
from tests.fake_ranks import fake_ranks
from tests.numerics.harness import EAGER
from tests.numerics.models import MLP, WIDTH

KWARGS: dict[str, dict[str, Any]] = {
    "shared by two ranks after forward": {"reshard_after_forward": 2},
    "cut along columns": {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 4 == 0 else None},
}


@pytest.mark.parametrize("how", KWARGS)
def test_explains_and_bisects_parameters_that_are(how: str) -> None:
    x = torch.ones(2, WIDTH)
    with fake_ranks(4) as mesh:
        model: Any = MLP()
        for block in model.blocks:
            fxshard.fully_shard(block, mesh=mesh, **KWARGS[how])
        fxshard.fully_shard(model, mesh=mesh, **KWARGS[how])
        assert fxshard.explain(model, x, options=EAGER).units == ("blocks.0", "blocks.1", "")
        assert fxshard.bisect_numerics(model, x, options=EAGER) is None
