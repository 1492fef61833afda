"""Mixtures of experts: units of several meshes in one model train as FSDP2 trains them."""

from __future__ import annotations

import pytest

from fxshard import torch_fsdp2
from tests.numerics import expert_bodies
from tests.state import processes

DEFAULT = ("placements", "dense")

pytestmark = pytest.mark.skipif(
    torch_fsdp2.ShardPlacementResult is None, reason="all_to_all of torch 2.11 takes no gradients but contiguous ones"
)


@pytest.mark.multi_rank
def test_two_by_two_ranks_train_as_fsdp2() -> None:
    processes.run(4, expert_bodies.run, (2, 2), *DEFAULT)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in expert_bodies.BODIES if name not in DEFAULT])
def test_two_by_two_ranks_train_as_fsdp2_also(name: str) -> None:
    processes.run(4, expert_bodies.run, (2, 2), name)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 4), "dense, one shard"),  # FSDP2 divides gradients of a mesh of one rank twice: docs/fsdp2.md
        ((4, 1), "dense"),
    ],
)
def test_meshes_of_other_shapes(shape: tuple[int, int], name: str) -> None:
    processes.run(4, expert_bodies.run, shape, "placements", name)
