"""Compiled steps are captured as CUDA graphs once and replayed, and compute the same."""

from __future__ import annotations

import pytest

from tests.gpu.checks import one_rank
from tests.gpu.cudagraphs import assert_same, train_and_count

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_steps_are_captured_once_and_replayed(microbatches: int) -> None:
    with one_rank("cuda"):
        ours = train_and_count("cuda", microbatches=microbatches, cudagraphs=True)
        # Recorded blocks are written out: with regions Inductor fuses, and so rounds, otherwise.
        reference = train_and_count("cuda", microbatches=microbatches, regions="off")
    assert_same(ours, reference)
    first, later = ours.captures
    assert ours.skips == 0
    assert first > 0
    assert later == 0
    assert len(set(ours.replays)) == 1, ours.replays
    assert ours.replays[0] >= 2 * microbatches, "a forward and a backward per microbatch"
