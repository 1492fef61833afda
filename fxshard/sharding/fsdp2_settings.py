"""FSDP2's settings of gradient reduction, and those that mean nothing here: what they set, refuse or say."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.runtime.step_hooks import ModelContext
from fxshard.runtime.unit import Unit

_log = logging.getLogger(__name__)

MEANINGLESS = {
    "set_unshard_in_backward": "backward gathers what it reads, and nothing else",
    "set_custom_all_gather": "torch's own change where buffers lie, which Inductor decides",
    "set_custom_reduce_scatter": "torch's own change where buffers lie, which Inductor decides",
    "set_allocate_memory_from_process_group_for_comm": "Inductor allocates the buffers of a graph",
    "set_symm_mem_for_comm": "Inductor allocates the buffers of a graph",
    "set_reduce_scatter_max_input_buffers": (
        'it is the option of the same name: torch.compile(..., options={"reduce_scatter_max_input_buffers": 2})'
    ),
    "share_comm_ctx": "models of one mesh share its process groups, and graphs have no streams of their own to share",
}
"""Names of FSDP2 that set nothing here -> why."""


@functools.cache
def say_once(name: str) -> None:
    """Say that a call of FSDP2's sets nothing."""
    _log.warning("fxshard: %s has no meaning here and sets nothing: %s.", name, MEANINGLESS[name])


def set_divide_factor(units: Iterable[Unit], factor: object) -> None:
    """Divide gradients by `factor`, not by the number of ranks."""
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise ConfigError(f"set_gradient_divide_factor: factor must be a positive number, got {factor!r}.")
    for unit in units:
        unit.set(divide_factor=float(factor))


def set_all_reduce_hook(units: Iterable[Unit], hook: object, stream: object) -> None:
    """Call `hook` with each reduced gradient of a flat."""
    if not callable(hook):
        raise ConfigError(f"set_all_reduce_hook expects a function of a tensor, got {type(hook).__name__}.")
    for unit in units:
        if unit.settings.offload is not None and unit.mesh.device_type != "cpu":
            raise ConfigError(
                f"set_all_reduce_hook: unit {unit.label!r} is offloaded. Gradients on the host are handed over in an "
                "order that ranks do not share, so a hook could call no collective. Shard over a mesh with replicas, "
                "whose gradients are averaged in the graph, or leave offload_policy out."
            )
        if stream is not None and unit.plan.replicas > 1:
            raise ConfigError(
                "set_all_reduce_hook: a stream is for a mesh of one axis; with replicas the hook runs behind the "
                "all_reduce of the graph. Leave stream out."
            )
        unit.set(all_reduce_hook=hook if stream is None else _on_stream(hook, stream))
        for shard in unit.shards:
            shard.sink.hook = unit.settings.all_reduce_hook


def _on_stream(hook: Callable[[Tensor], object], stream: object) -> Callable[[Tensor], None]:
    """Run `hook` on a stream between what was there before and what comes."""
    if not isinstance(stream, torch.Stream):
        raise ConfigError(f"set_all_reduce_hook: stream must be a torch.Stream, got {type(stream).__name__}.")

    def run(grad: Tensor) -> None:
        current = torch.accelerator.current_stream(grad.device)
        stream.wait_stream(current)
        with stream:
            hook(grad)
        current.wait_stream(stream)

    return run


class GradientReductionHandle:
    """What `finalize_backward(async_op=True)` returns: the gradients are there already, so `wait()` returns at once."""

    def wait(self) -> None:
        """Return."""


def set_ended_by_hand(units: Sequence[Unit], enabled: bool) -> None:
    """Let the caller say when the last backward of a step has ended."""
    for model in _of_whole_model("set_manual_backward_finalization", units):
        model.settings = replace(model.settings, ended_by_hand=enabled)


def end_step(units: Sequence[Unit]) -> None:
    """End a step whose caller says when."""
    for model in _of_whole_model("finalize_backward", units):
        if not model.settings.ended_by_hand:
            raise ConfigError(
                "finalize_backward: backwards of this model end their step by themselves. Call "
                "set_manual_backward_finalization(True) before them, or leave finalize_backward out."
            )
        model.end_step()


def _of_whole_model(name: str, units: Sequence[Unit]) -> Iterator[ModelContext]:
    """Give what knows the backwards of a model, if it has any, between two of them, and `units` are all of it."""
    if torch_private.backward_id() is not None:
        raise ConfigError(f"{name} was called while a backward runs. Call it before or after.")
    if not units:
        return
    if len(units[0].model.units) > len(units):
        raise ConfigError(f"{name}: {units[0].label} is part of a larger model. Call it on the outermost module.")
    yield units[0].model


def refuse_kept_storage(keep: bool) -> None:
    """Refuse to keep the memory of gathered parameters."""
    if keep:
        raise NotImplementedError(
            "set_keep_unsharded_storage(True) is not implemented: a graph owns what it gathers, and allocates it anew "
            'in each run. For CUDA graphs use torch.compile(..., options={"cudagraphs": True}); to gather less often '
            "set_reshard_after_forward(False), or between microbatches set_reshard_after_backward(False)."
        )


def set_comm(units: Iterable[Unit], kind: str, comm: Any) -> None:
    """Let an object of the user's do a `kind` of collectives of units; one of torch's takes that back."""
    is_torchs, name = type(comm).__module__.startswith("torch."), f"set_custom_{kind}"
    if not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise ConfigError(
            f"{name} expects an object that can be called and has allocate(size, *, dtype, device), as FSDP2's, got "
            f"{type(comm).__name__}."
        )
    for unit in units:
        unit.set(**{f"{kind}_comm": None if is_torchs else comm})
    if is_torchs:
        say_once(name)
