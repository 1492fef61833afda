"""What ranks do in the tests of checkpoints: build, train, save, load, and die."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fxshard
from tests.numerics.models import MLP, WIDTH, Scalars, Tables, Uneven, tied_gpt

GLOBAL_ROWS = 8


class Mixed(nn.Module):
    """Parameters of every kind: uneven ones, frozen ones, buffers of integers, and what else `inner` has."""

    def __init__(self, inner: Callable[[], nn.Module] = Scalars) -> None:
        super().__init__()
        self.uneven, self.inner, self.tables = Uneven(), inner(), Tables()
        self.into = nn.Linear(WIDTH, 15)
        self.out = nn.Linear(15, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.tables(self.inner(self.out(self.uneven(self.into(x)))))


def uneven() -> nn.Module:
    """Return the same without parameters that have no dimension, which FSDP2 does not take."""
    return Mixed(nn.Identity)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "mixed": Mixed, "uneven": uneven, "tied": tied_gpt}
SHARDERS: dict[str, Callable[[nn.Module], Any] | None] = {
    "fxshard": fxshard.fully_shard,
    "fsdp2": fsdp2_fully_shard,
    "unsharded": None,
}


def build(
    name: str = "mlp", system: str = "fxshard", seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = MODELS[name]().to(dtype)
    if (shard := SHARDERS[system]) is not None:
        for block in getattr(model, "blocks", ()):
            shard(block)
        shard(model)
    return model, adamw(model)


def adamw(model: nn.Module) -> Optimizer:
    """Return an optimizer with biases and gains in a group of their own."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for p in parameters if p.dim() > 1]}]
    groups.append({"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=1e-2)


def rows_of_rank(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a global batch that does not depend on how many ranks there are."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(GLOBAL_ROWS, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return x.chunk(size)[rank], y.chunk(size)[rank]


def train(model: nn.Module, optim: Optimizer, steps: range) -> list[float]:
    """Train on the global batches of `steps`; return the mean loss over the ranks of each."""
    losses = []
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for step in steps:
        x, y = rows_of_rank(step, dtype)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
    return losses


def whole(value: Any) -> Any:
    """Return copies of tensors, gathered where they are sharded, and everything else as it is."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    return value


def state_of(model: nn.Module, optim: Optimizer | None = None) -> dict[str, Any]:
    """Return all state in full: parameters, buffers, and the optimizer's by parameter name."""
    plain = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    found: dict[str, Any] = {"model": whole(plain)}
    if optim is not None:
        names = {id(p): name.replace("_orig_mod.", "") for name, p in model.named_parameters()}
        found["state"] = {names[id(p)]: whole(dict(state)) for p, state in optim.state.items() if state}
        found["groups"] = [
            {key: [names[id(p)] for p in value] if key == "params" else whole(value) for key, value in group.items()}
            for group in optim.param_groups
        ]
    return found


# ---- bodies


def train_and_save(path: str, name: str, system: str, steps: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Train a few steps and save; return the state in full."""
    model, optim = build(name, system, dtype=dtype)
    train(model, optim, range(steps))
    fxshard.save_checkpoint(path, model, optim, extra={"step": steps})
    return state_of(model, optim)


def load(path: str, name: str, system: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    model, optim = build(name, system, seed=1, dtype=dtype)
    extra = fxshard.load_checkpoint(path, model, optim)
    return {**state_of(model, optim), "extra": extra}


def load_and_train(path: str, name: str, system: str, steps: range, dtype: torch.dtype) -> list[float]:
    model, optim = build(name, system, seed=1, dtype=dtype)
    fxshard.load_checkpoint(path, model, optim)
    return train(model, optim, steps)


def save_and_train_on(path: str, saved: int, steps: int, dtype: torch.dtype) -> list[float]:
    """Train the MLP, save it, and go on; return the losses since then."""
    model, optim = build(dtype=dtype)
    train(model, optim, range(saved))
    fxshard.save_checkpoint(path, model, optim)
    return train(model, optim, range(saved, steps))


class FileEvents:
    """Counts what this process does in a folder, and kills it before the event with a number.

    Events are Python's own audit events: files opened, folders made, listed and renamed, files removed.
    """

    def __init__(self, folder: str, kill_at: int | None) -> None:
        self.count = 0
        self.names: list[str] = []
        self._folder, self._kill_at = folder, kill_at
        self._on = True
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on or not (event == "open" or event.startswith(("os.", "shutil."))):
            return
        if not any(isinstance(arg, str | os.PathLike) and os.fspath(arg).startswith(self._folder) for arg in args):
            return
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(event)
        self.count += 1

    def stop(self) -> None:
        """Count no more; an audit hook cannot be removed."""
        self._on = False


def save_over(path: str, killed_rank: int, kill_at: int | None) -> list[str]:
    """Save a checkpoint of step 2 over one that is there; rank `killed_rank` dies before a file event.

    Returns:
        The events of this rank.
    """
    model, optim = build()
    train(model, optim, range(2))
    events = FileEvents(str(Path(path).parent), kill_at if dist.get_rank() == killed_rank else None)
    fxshard.save_checkpoint(path, model, optim, extra={"step": 2})
    events.stop()
    return events.names


def save_over_and_die_after(path: str, killed_rank: int, share: float) -> None:
    """Save three times to know how long it takes; in the fourth, `killed_rank` dies after that share of the time."""
    model, optim = build()
    train(model, optim, range(2))
    for i in range(3):
        dist.barrier()
        began = time.monotonic()
        fxshard.save_checkpoint(f"{path}-{dist.get_world_size()}", model, optim, extra=i)
    seconds = time.monotonic() - began
    if dist.get_rank() == 0:
        shutil.rmtree(f"{path}-{dist.get_world_size()}")
    dist.barrier()
    if dist.get_rank() == killed_rank:
        threading.Timer(seconds * share, os.kill, (os.getpid(), signal.SIGKILL)).start()
    fxshard.save_checkpoint(path, model, optim, extra={"step": 2})
    if dist.get_rank() == killed_rank:
        time.sleep(seconds + 10.0)
