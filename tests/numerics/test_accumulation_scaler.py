"""Several microbatches under a GradScaler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.harness import Run, Scenario, check
from tests.numerics.microbatches import NUM_MICROBATCHES, Backward, loss_of, set_sync
from tests.numerics.models import MLP, rows
from tests.ranks import two_ranks


def scaled(scaler_of: Callable[[Run], torch.amp.GradScaler]) -> tuple[Backward, Callable[[Run], None]]:
    """Three microbatches under a GradScaler, and the update that goes with them."""

    def backward(run: Run, step: int) -> Tensor:
        losses = []
        for i in range(NUM_MICROBATCHES):
            set_sync(run.model, i == NUM_MICROBATCHES - 1)
            losses.append(loss_of(run, step, i))
            scaler_of(run).scale(losses[-1]).backward()
        return torch.stack([loss.detach() for loss in losses]).sum()

    def step(run: Run) -> None:
        scaler = scaler_of(run)
        scaler.unscale_(run.optim)
        nn.utils.clip_grad_norm_(run.model.parameters(), max_norm=1.0)
        scaler.step(run.optim)
        scaler.update()
        run.optim.zero_grad()
        run.extra.append(torch.tensor(scaler.get_scale()))

    return backward, step


def overflowing(step: int, rank: int) -> tuple[Tensor, ...]:
    """Rows of which one overflows, in a first microbatch of one rank."""
    x, y = rows()(step, rank)
    if (step, rank) == (10, 1):
        y[0, 0] = float("inf")
    return x, y


@pytest.mark.slow
@two_ranks
def test_skips_the_step_in_which_a_microbatch_overflowed() -> None:
    scalers: dict[Run, torch.amp.GradScaler] = {}
    backward, step = scaled(
        lambda run: scalers.setdefault(run, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
    )
    check(Scenario(model=MLP, batch=overflowing, backward=backward, update=step))
