"""Training goes on from what was saved, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

import fxshard
from tests.numerics.harness import Run, assert_close, full, fxshard_system, start, train_step
from tests.numerics.scenarios import REGRESSION


def _through_a_folder(run: Run, folder: Path) -> Callable[[Run], None]:
    fxshard.save_checkpoint(folder, run.model, run.optim)

    def load(other: Run) -> None:
        fxshard.load_checkpoint(folder, other.model, other.optim)

    return load


def _through_full_states(run: Run, folder: Path) -> Callable[[Run], None]:
    model, optim = fxshard.full_state_dict(run.model), fxshard.full_optim_state_dict(run.model, run.optim)
    assert all(tensor.device.type == "cpu" for tensor in model.values())

    def load(other: Run) -> None:
        fxshard.load_full_state_dict(other.model, model)
        fxshard.load_full_optim_state_dict(other.model, other.optim, optim)

    return load


def _through_state_dicts(run: Run, folder: Path) -> Callable[[Run], None]:
    torch.save({"model": run.model.state_dict(), "optim": run.optim.state_dict()}, folder)
    state = torch.load(folder, weights_only=False)

    def load(other: Run) -> None:
        other.model.load_state_dict(state["model"])
        other.optim.load_state_dict(state["optim"])

    return load


CHECKPOINTS: Final[Mapping[str, Callable[[Run, Path], Callable[[Run], None]]]] = {
    "a folder": _through_a_folder,
    "full states": _through_full_states,
    "state dicts": _through_state_dicts,
}


def check_checkpoint(through: str, device: str, folder: Path) -> None:
    """Train two steps, save, load into a model that was trained otherwise, and go on as if nothing had happened.

    Args:
        through: key of `CHECKPOINTS`.
        device: "cuda" or "cpu".
        folder: for files; `folder / "state"` must not exist.
    """
    system = fxshard_system(device=device)
    run = start(REGRESSION, system)
    for step in range(2):
        train_step(run, step)
    load = CHECKPOINTS[through](run, folder / "state")
    torch._dynamo.reset()
    other = start(REGRESSION, system)
    train_step(other, 7)
    load(other)
    for step in (2, 3):
        train_step(run, step)
        train_step(other, step)
    compared = zip(run.named_parameters().items(), other.named_parameters().values(), strict=True)
    torch.testing.assert_close(other.losses[-2:], run.losses[-2:], rtol=1e-6, atol=1e-7)
    for (name, expected), actual in compared:
        assert_close(full(actual), full(expected), name, rtol=1e-6, atol=1e-7)
