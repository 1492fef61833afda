"""A system with its model on an emulated link, ready to take steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxshard.bench import systems
from fxshard.bench.systems import Trainer
from fxshard.bench.task import Task
from fxshard.testing import EmulatedLink, emulated_link
from fxshard.testing.emulated_group import EmulatedGroup
from tests.bench.gpu.settings import COMPUTE, PRECISION, Link, Model
from tests.bench.gpu.talk import Job
from tests.bench.llama import Llama

_SEED, _LR = 0, 1e-4


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in backward; a unit of its own, in place of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.layer, *inputs, use_reentrant=False, preserve_rng_state=False)
        return result


@contextlib.contextmanager
def open_link(world_size: int, device: str) -> Iterator[EmulatedLink]:
    """An instant link for tensors on `device`."""
    where: dict[str, Any] = {"device": device, "ctas": Link().ctas} if device == "cuda" else {}
    with emulated_link(world_size, **where) as link:
        yield link


def set_speed(link: EmulatedLink, speed: Link, device: str) -> None:
    """Change the speed of a live link: all that is compiled for it stays."""
    ctas = speed.ctas if device == "cuda" else None
    link.set_speed(gigabytes_per_s=speed.gigabytes_per_s, latency_us=speed.latency_us, ctas=ctas)


@contextlib.contextmanager
def estimable(device: str) -> Iterator[None]:
    """Let Inductor's overlap scheduling estimate collectives by its formulas.

    In torch 2.11 it first asks the group's backend, and ends the compilation where a group, being written in Python,
    has none.
    """
    nothing = SimpleNamespace(supports_time_estimate=False, _supports_time_estimate=False)
    with (
        patch.object(EmulatedGroup, "_device_types", [torch.device(device)]),
        patch.object(EmulatedGroup, "_get_backend", lambda group, device: nothing),
    ):
        yield


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy of each token given those before it; the first one is taken to follow the last."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def make_task(model: Model, device: str, *, checkpointing: bool) -> Task:
    """The model in fp32, with the same weights and the same batch for every system."""
    torch.manual_seed(_SEED)
    with torch.device(device):
        llama = Llama(model.shape)
        tokens = torch.randint(model.shape.vocab_size, (model.batch_size, model.seq_len))
    if checkpointing:
        llama.layers = nn.ModuleList(Checkpointed(layer) for layer in llama.layers)
    return Task(model=llama, batch=tokens, loss_fn=loss_of)


def make_trainer(job: Job, task: Task, mesh: DeviceMesh) -> Trainer:
    """Apply the system of a job to the model."""
    if job.entry.system == COMPUTE:
        return _compute_only(task, job.world_size)
    return systems.make_trainer(job.entry, task, mesh, _LR)


def _compute_only(task: Task, world_size: int) -> Trainer:
    """What a rank computes: the whole model in low precision, and an optimizer for as much as a rank holds."""
    numel = sum(parameter.numel() for parameter in task.model.parameters())
    device = next(task.model.parameters()).device
    task.model.to(PRECISION.param_dtype)
    shard = nn.Parameter(torch.zeros(numel // world_size, device=device))
    grad = torch.zeros_like(shard)

    def exchange_gradients(model: nn.Module) -> None:
        shard.grad = grad
        for parameter in model.parameters():
            parameter.grad = None

    return Trainer(
        task=task,
        forward=torch.compile(task.model),
        optimizer=torch.optim.AdamW([shard], lr=_LR, fused=True),
        after_backward=exchange_gradients,
    )
