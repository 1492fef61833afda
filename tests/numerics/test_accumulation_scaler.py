"""Several microbatches under a GradScaler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.numerics.harness import Run, Scenario, check
from tests.numerics.loops import ScaledLoop
from tests.numerics.microbatches import NUM_MICROBATCHES, loss_of, set_sync
from tests.numerics.models import MLP, rows
from tests.ranks import two_ranks


def overflowing(step: int, rank: int) -> tuple[Tensor, ...]:
    """Rows of which one overflows, in a first microbatch of one rank."""
    x, y = rows()(step, rank)
    if (step, rank) == (10, 1):
        y[0, 0] = float("inf")
    return x, y


class ScaledMicrobatches(ScaledLoop):
    """Three microbatches per step."""

    def backward(self, run: Run, step: int) -> Tensor:
        """Run backward of each scaled loss."""
        losses = []
        for i in range(NUM_MICROBATCHES):
            set_sync(run.model, i == NUM_MICROBATCHES - 1)
            losses.append(loss_of(run, step, i))
            self.scaler_of(run).scale(losses[-1]).backward()
        return torch.stack([loss.detach() for loss in losses]).sum()


@pytest.mark.slow
@two_ranks
def test_skips_the_step_in_which_a_microbatch_overflowed() -> None:
    loop = ScaledMicrobatches()
    check(Scenario(model=MLP, batch=overflowing, backward=loop.backward, update=loop.update))
