"""For bodies that run on the shared pool of two ranks."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import fxshard
from fxshard import ConfigError
from tests.ranks import group_folder
from tests.state.bodies import state_of
from tests.state.states import adamw, assert_same, net, sharded, take_steps


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of both ranks; what a failed test leaves goes with the pool."""
    name = [tempfile.mkdtemp(dir=group_folder()) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name, 0)
    yield Path(name[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(name[0])


def on_rank_0(work: Any) -> None:
    """Do `work` on rank 0 while the other one waits."""
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def on_first(value: Any, on_every_rank: bool = False) -> Any:
    """Return a state on rank 0, or on every rank, and an empty one elsewhere."""
    return value if on_every_rank or dist.get_rank() == 0 else {}


def load_saved(saved: tuple[nn.Module, Optimizer], loading: tuple[nn.Module, Optimizer]) -> None:
    """Save one model with its optimizer, and load another with its own from that checkpoint."""
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", *saved)
        fxshard.load_checkpoint(folder / "a", *loading)


def require_refusal(
    path: Path, model: nn.Module, optim: Optimizer | None, kind: type[Exception], *messages: str
) -> None:
    """Loading raises an error with all of `messages` on this rank, and changes nothing."""
    before = state_of(model, optim)
    with pytest.raises(kind) as caught:
        fxshard.load_checkpoint(path, model, optim)
    for message in messages:
        assert message in str(caught.value), str(caught.value)
    assert_same(state_of(model, optim), before)


def trained_on_ranks() -> tuple[nn.Module, Optimizer]:
    model = sharded(net())
    optim = adamw(model)
    take_steps(model, optim)
    return model, optim


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call it; return what it raised, the same on both ranks."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, str(caught.value))
    assert texts[0] == texts[1]
    return str(caught.value)
