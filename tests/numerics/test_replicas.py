"""Meshes of two axes: replicas of a sharded model train as FSDP2's do, and are saved, loaded and taken over alike."""

from __future__ import annotations

import pytest

from tests.numerics import replicas
from tests.pairwise import slow
from tests.ranks import two_ranks
from tests.state import processes

DEFAULT = ("compiled", "placements", "averaged without a backward", "offloaded")
ON_FOUR_RANKS = (
    "compiled",
    "averaged once",
    "full state",
)


@two_ranks
@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else slow(name) for name in replicas.EXACT | replicas.COMPILED]
)
def test_replicas_of_one_rank_each(name: str) -> None:
    replicas.run(2, name)


@pytest.mark.multi_rank
def test_two_replicas_of_two_ranks_each() -> None:
    processes.run(4, replicas.run, 2, *ON_FOUR_RANKS)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in replicas.EXACT | replicas.COMPILED if name not in ON_FOUR_RANKS])
def test_two_replicas_of_two_ranks_each_also(name: str) -> None:
    processes.run(4, replicas.run, 2, name)
