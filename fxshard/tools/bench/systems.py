"""The systems that are compared: each takes the same model and gives what to call and what to optimise.

Every one is used as its authors recommend, with the same units: what stands in ModuleLists and Sequentials, and
the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import fxshard
from fxshard import torch_private
from fxshard.passes.chain_reductions import ChainReductions
from fxshard.passes.defer_weight_gradients import DeferWeightGradients
from fxshard.passes.hoist_prefetch import HoistPrefetch
from fxshard.passes.pipeline import Pipeline
from fxshard.passes.sink_waits import SinkWaits
from fxshard.tools.bench.config import FXSHARD, REFERENCE, Entry
from fxshard.tools.bench.simplefsdp import parametrize
from fxshard.tools.bench.task import Task, units_of

Forward = Callable[..., Any]

LOCAL: Final = ("local", "local_compiled")  # every rank for itself
WHOLE: Final = (*LOCAL, "ddp", REFERENCE)  # every rank holds all parameters

_AHEAD: Final = 2  # units on each list of fxshard_listed


@dataclass(kw_only=True)
class Trainer:
    """One system with its model, ready to take steps."""

    task: Task  # the model and its batch
    forward: Forward  # the model as the system calls it
    optimizer: torch.optim.Optimizer  # of its parameters
    microbatches: int = 1  # forwards and backwards per step, all of the task's one batch
    # around each microbatch, told whether it is the last one
    begin: Callable[[bool], AbstractContextManager[None]] = lambda is_last: nullcontext()
    after_backward: Callable[[nn.Module], None] | None = None  # what a system does between backward and optimizer

    def step(self) -> Tensor:
        """Train one step; return the loss."""
        for i in range(self.microbatches):
            with self.begin(i == self.microbatches - 1):
                loss = self.task.loss(self.forward)
                (loss / self.microbatches if self.microbatches > 1 else loss).backward()
        if self.after_backward is not None:
            self.after_backward(self.task.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def make_trainer(entry: Entry, task: Task, mesh: DeviceMesh, lr: float, *, microbatches: int = 1) -> Trainer:
    """Apply a system to the model of a task."""
    forward = _MAKE[entry.system](task.model, mesh, entry)
    return Trainer(
        task=task,
        forward=forward,
        optimizer=torch.optim.AdamW(task.model.parameters(), lr=lr, fused=True),
        microbatches=microbatches,
        begin=functools.partial(_begin, forward, task.model, entry),
        after_backward=average_gradients if entry.system == REFERENCE else None,
    )


def _begin(forward: Forward, model: nn.Module, entry: Entry, is_last: bool) -> AbstractContextManager[None]:
    """Have the last microbatch reduce, and no other, as the system's authors say how."""
    if isinstance(forward, nn.parallel.DistributedDataParallel):
        return nullcontext() if is_last else forward.no_sync()
    if isinstance(model, FSDPModule | fxshard.ShardedModule):
        model.set_requires_gradient_sync(is_last)
    if isinstance(model, FSDPModule) and entry.system == "fsdp2_kept":
        model.set_reshard_after_backward(is_last)
    return nullcontext()


def average_gradients(model: nn.Module) -> None:
    """Average every gradient over the ranks: data parallelism without any library."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def unsharded_peak_bytes(entry: Entry, model: nn.Module) -> int | None:
    """The most of gathered parameters that is live at once; known of fxshard alone, from its graphs."""
    if entry.system != FXSHARD:
        return None
    peaks = [
        int(frame.stats_of(frame.history.last(stage)).evaluate().unsharded_peak_bytes)
        for frame in fxshard.explanation_of(model).frames
        for stage in frame.final_stages()
    ]
    return max(peaks, default=None)


def _ddp(model: nn.Module, mesh: DeviceMesh, entry: Entry) -> Forward:
    ranks = mesh.get_group() if mesh.ndim == 1 else None
    return nn.parallel.DistributedDataParallel(model, process_group=ranks, gradient_as_bucket_view=True)


def _fsdp2(model: nn.Module, mesh: DeviceMesh, entry: Entry) -> Forward:
    for unit in units_of(model):
        torch_fully_shard(unit, mesh=mesh, mp_policy=entry.mp_policy)
    return model


def _fsdp2_compiled(model: nn.Module, mesh: DeviceMesh, entry: Entry) -> Forward:
    *blocks, _ = units_of(model)
    _fsdp2(model, mesh, entry)
    for block in blocks:
        # As block.compile(), which under FSDP2's hooks leaves out silently what is of a class of torch.nn.
        block.forward = _with_inputs_there(torch.compile(block.forward))
    return model


def _with_inputs_there(compiled: Forward) -> Forward:
    """Copy inputs that a collective still fills: torch (2.13) loses their gradients in compiled code of a block."""

    def there(value: Tensor) -> Tensor:
        return value.clone() if torch_private.is_wrapper(value) and not isinstance(value, DTensor) else value

    def forward(*inputs: Any, **named: Any) -> Any:
        return compiled(*tree_map_only(Tensor, there, inputs), **named)

    return forward


def _fsdp2_best(model: nn.Module, mesh: DeviceMesh, entry: Entry) -> Forward:
    """Order of use is taken to be order of registration, as in FSDP2's own examples."""
    *blocks, root = cast(list[FSDPModule], units_of(model))
    _fsdp2_compiled(model, mesh, entry)
    for unit, following in zip([root, *blocks], blocks, strict=False):
        unit.set_modules_to_forward_prefetch([following])
    if mesh.device_type == "cpu":
        root._set_unshard_async_op(True)  # without streams nothing else makes a gather asynchronous
    return model


def _simplefsdp(model: nn.Module, mesh: DeviceMesh, entry: Entry, **options: Any) -> Forward:
    parametrize(model, mesh, entry.mp_policy)
    return torch.compile(model, fullgraph=True, options=options or None)


def _simplefsdp_overlapped(model: nn.Module, mesh: DeviceMesh, entry: Entry) -> Forward:
    """As torchtitan's automatic bucketing, but buffers are reused; `entry.options` may say how fast the link is."""
    scheduling = ("enable_overlap_scheduling", "collective_bucketing", "insert_overlap_deps")
    options: dict[str, Any] = {f"aten_distributed_optimizations.{name}": True for name in scheduling}
    # Inductor's other schedulers would undo what this one decides.
    options |= {"reorder_for_peak_memory": False, "reorder_for_compute_comm_overlap": False, **entry.options}
    return _simplefsdp(model, mesh, entry, **options)


def _fxshard(model: nn.Module, mesh: DeviceMesh, entry: Entry) -> Forward:
    for unit in units_of(model):
        fxshard.fully_shard(unit, mesh=mesh, mp_policy=entry.mp_policy)
    return torch.compile(model, backend="fxshard", options=dict(entry.options))


def _fxshard_listed(model: nn.Module, mesh: DeviceMesh, entry: Entry) -> Forward:
    forward = _fxshard(model, mesh, entry)
    *blocks, root = cast(list[fxshard.ShardedModule], units_of(model))
    for i, unit in enumerate([root, *blocks]):
        unit.set_modules_to_forward_prefetch(blocks[i : i + _AHEAD])
    for i, unit in enumerate([root, *reversed(blocks)]):
        unit.set_modules_to_backward_prefetch(list(reversed(blocks))[i : i + _AHEAD])
    return forward


def _fxshard_unordered(model: nn.Module, mesh: DeviceMesh, entry: Entry) -> Forward:
    return _fxshard(model, mesh, replace(entry, options={"passes": _without_order}))


def _without_order(pipeline: Pipeline) -> Pipeline:
    kept = tuple(
        p
        for p in pipeline.split
        if not isinstance(p, DeferWeightGradients | SinkWaits | HoistPrefetch | ChainReductions)
    )
    return replace(pipeline, split=kept, last=(), codegen=())


_MAKE: Final[dict[str, Callable[[nn.Module, DeviceMesh, Entry], Forward]]] = {
    REFERENCE: lambda model, mesh, entry: model,
    "local": lambda model, mesh, entry: model,
    "local_compiled": lambda model, mesh, entry: torch.compile(model),
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "fsdp2_compiled": _fsdp2_compiled,
    "fsdp2_best": _fsdp2_best,
    "fsdp2_kept": _fsdp2_best,
    "simplefsdp": _simplefsdp,
    "simplefsdp_bucketed": functools.partial(_simplefsdp, bucket_all_gathers_fx="all", bucket_reduce_scatters_fx="all"),
    "simplefsdp_overlapped": _simplefsdp_overlapped,
    "fxshard_unordered": _fxshard_unordered,
    "fxshard_listed": _fxshard_listed,
    FXSHARD: _fxshard,
}
