"""A system with its model on an emulated link, ready to take steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._inductor.fx_passes.overlap_scheduling import OverlapScheduler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.gate import Gate
from benchmarks.gpu.settings import COMPUTE, PRECISION, Link, Model
from benchmarks.gpu.talk import Job
from benchmarks.llama import Llama
from fxshard.testing import EmulatedLink, emulated_link
from fxshard.testing.emulated_group import EmulatedGroup
from fxshard.tools.bench import systems
from fxshard.tools.bench.systems import Trainer
from fxshard.tools.bench.task import Task

_SEED, _LR = 0, 1e-4
_ALIGN: Final = "_align_compute_nodes_runtime_estimations_across_all_distributed_ranks"


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in backward; a unit of its own, in place of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        return checkpoint(self.layer, *inputs, use_reentrant=False, preserve_rng_state=False)


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
def estimable(device: str, gate: Gate) -> Iterator[None]:
    """Let Inductor's overlap scheduling estimate collectives as it is told, and time matrix products undisturbed.

    In torch 2.11 it first asks the group's backend, and ends the compilation where a group, being written in Python,
    has none. On a GPU it times products while it compiles: nobody else may run meanwhile.
    """
    align = getattr(OverlapScheduler, _ALIGN)

    @functools.wraps(align)
    def undisturbed(self: OverlapScheduler) -> None:
        with gate.taken():
            align(self)

    nothing = SimpleNamespace(supports_time_estimate=False, _supports_time_estimate=False)
    with (
        patch.object(EmulatedGroup, "_device_types", [torch.device(device)]),
        patch.object(EmulatedGroup, "_get_backend", lambda group, device: nothing),
        patch.object(OverlapScheduler, _ALIGN, undisturbed),
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
        return _compute_alone(job, task, mesh)
    if job.entry.system.startswith("fsdp2"):
        _shard_ends(task.model, mesh)
    trainer = systems.make_trainer(job.entry, task, mesh, _LR)
    if job.entry.system == "fsdp2_best":
        _prefetch_ends(task.model)
    return trainer


def _compute_alone(job: Job, task: Task, mesh: DeviceMesh) -> Trainer:
    """Send nothing; the optimizer steps as many numbers as a rank's shards have, with gradients of zero."""
    parameters = list(task.model.parameters())
    numel = sum(parameter.numel() for parameter in parameters) // mesh.size()
    shard = nn.Parameter(torch.zeros(numel, device=parameters[0].device))
    grad = torch.zeros_like(shard)

    def take_gradients(model: nn.Module) -> None:
        shard.grad = grad
        for parameter in model.parameters():
            parameter.grad = None

    forward = torch.compile(task.model.to(job.entry.mp_policy.param_dtype))
    optimizer = torch.optim.AdamW([shard], lr=_LR, fused=True)
    return Trainer(task=task, forward=forward, optimizer=optimizer, after_backward=take_gradients)


def _shard_ends(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give what lies before and behind FSDP2's layers units of their own, as torchtitan does for its Llama.

    There, too, the head stays gathered between forward and backward, and the embedding does not.
    """
    assert isinstance(model, Llama)
    fully_shard(model.tokens, mesh=mesh, mp_policy=PRECISION, reshard_after_forward=True)
    fully_shard([model.norm, model.head], mesh=mesh, mp_policy=PRECISION, reshard_after_forward=False)


def _prefetch_ends(model: nn.Module) -> None:
    """Have the units of `_shard_ends` gathered in the order of their use too."""
    units = cast(list[FSDPModule], [model, model.tokens, *cast(nn.ModuleList, model.layers), model.norm])
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
