"""`reshard_after_forward=2` on four ranks trains as in FSDP2, and backward gathers over two."""

from __future__ import annotations

import pytest

from tests.numerics import subgroups
from tests.state import processes

DEFAULT = ("compiled", "called twice", "adopted, bfloat16")


@pytest.mark.multi_rank
def test_two_ranks_share_the_parameters_between_forward_and_backward() -> None:
    processes.run(4, subgroups.run, *DEFAULT)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in subgroups.BODIES if name not in DEFAULT])
def test_two_ranks_share_the_parameters_also(name: str) -> None:
    processes.run(4, subgroups.run, name)
