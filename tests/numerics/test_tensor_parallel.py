"""Tensor parallelism below: parameters that are DTensors already train as FSDP2 trains them."""

from __future__ import annotations

import pytest

from tests.numerics import tensor_parallel
from tests.state import processes

DEFAULT = ("placements", "compiled", "not compiled")


@pytest.mark.multi_rank
def test_two_by_two_ranks_train_as_fsdp2() -> None:
    processes.run(4, tensor_parallel.run, (2, 2), *DEFAULT)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in tensor_parallel.BODIES if name not in DEFAULT])
def test_two_by_two_ranks_train_as_fsdp2_also(name: str) -> None:
    processes.run(4, tensor_parallel.run, (2, 2), name)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 1, 2), (1, 2, 2)])
def test_meshes_of_other_shapes(shape: tuple[int, ...]) -> None:
    processes.run(4, tensor_parallel.run, shape, "placements", "compiled")


@pytest.mark.multi_rank
def test_full_states_of_replicas_with_one_shard_are_copies_that_load() -> None:
    processes.run(4, tensor_parallel.run, (2, 1, 2), "full state")
