"""Every public name of torch's FSDP2, and how ours stands to it: what `docs/fsdp2.md` is made of."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch.distributed.fsdp as fsdp2
from torch.distributed.fsdp import _fully_shard

import fxshard

Status = Literal["same", "differs", "sets nothing", "refused", "missing"]


class Row(NamedTuple):
    """How one name stands: in words where it is not the same; `torch` is where only some versions have it."""

    status: Status
    how: str = ""
    torch: str = ""


FUNCTIONS: Mapping[str, Row] = {
    "fully_shard": Row(
        "differs",
        "see its arguments; a module becomes a `ShardedModule`, which is no `FSDPModule`. Tensor subclasses with "
        "`fsdp_pre_all_gather` are gathered as in FSDP2 ([what is refused](adr/0020-fsdp2-compatibility.md))",
    ),
    "FSDPModule": Row(
        "differs", "`ShardedModule`, with the same methods: libraries reach into the private state of torch's"
    ),
    "UnshardHandle": Row("same", "a class of its own"),
    "register_fsdp_forward_method": Row("same"),
    "share_comm_ctx": Row("sets nothing", "graphs have no streams of their own to share"),
    "MixedPrecisionPolicy": Row("same", "torch's own class"),
    "OffloadPolicy": Row("same", "torch's own class, the default: nothing is offloaded"),
    "CPUOffloadPolicy": Row("same", "torch's own class; on GPUs it goes with no `set_all_reduce_hook`"),
    "GradientReductionHandle": Row("same", "a class of its own", torch="2.15"),
    "DataParallelMeshDims": Row("missing", "import torch's own, which `dp_mesh_dims` takes", torch="2.13, 2.15"),
}

ARGUMENTS: Mapping[str, Row] = {
    "module": Row("same"),
    "mesh": Row(
        "same",
        "one axis, or (replicate, shard), beside that of DTensor parameters; without a process group one is made",
    ),
    "reshard_after_forward": Row(
        "differs",
        "True, False, None and a number of ranks. Code that is not compiled keeps what autograd saved",
    ),
    "shard_placement_fn": Row(
        "same", "`Shard(d)`, None, and `ShardPlacementResult`: what has a mesh of its own is in a unit of its own"
    ),
    "mp_policy": Row("same", "a unit may also have parameters of several dtypes, which FSDP2 asserts that it has not"),
    "offload_policy": Row("same", "on a CPU mesh shards are copied too, and never pinned"),
    "ignored_params": Row("same"),
    "dp_mesh_dims": Row(
        "differs",
        "axes that replicate alone are refused. A gradient that is whole on the axes that shard is divided by them",
        torch="2.13, 2.15",
    ),
}

POLICY: Mapping[str, Row] = {
    "param_dtype": Row("same"),
    "reduce_dtype": Row("same"),
    "output_dtype": Row("same"),
    "cast_forward_inputs": Row("same"),
    "param_dtype_override_fn": Row("same", torch="2.15"),
}

METHODS: Mapping[str, Row] = {
    "unshard": Row("differs", "gathers for the next call of the outermost module; a graph takes over its first gather"),
    "reshard": Row("differs", "frees what was gathered outside of graphs; a graph frees its own"),
    "reset_iter_state": Row("same", "also drops gradients that wait", torch="2.13, 2.15"),
    "set_is_last_backward": Row("same"),
    "set_manual_backward_finalization": Row("same", torch="2.15"),
    "finalize_backward": Row(
        "differs",
        "reduces what still waits: what a backward touches it has reduced when it ends; refused without the mode",
        torch="2.15",
    ),
    "set_keep_unsharded_storage": Row(
        "refused", "a graph owns what it gathers; the option `cudagraphs` records graphs", torch="2.15"
    ),
    "set_requires_gradient_sync": Row(
        "differs", "the flag is read when backward runs; sums are kept unsharded in the reduce dtype"
    ),
    "set_requires_all_reduce": Row(
        "differs",
        "the all_reduce of what was added up runs outside of the graph; what no backward touched is averaged too",
    ),
    "set_reshard_after_forward": Row("same"),
    "set_reshard_after_backward": Row("differs", "compiled code only; parameters stay until a step or a write"),
    "set_modules_to_forward_prefetch": Row(
        "differs", "compiled code only; None launches nothing ahead, and without a list the cost model decides"
    ),
    "set_modules_to_backward_prefetch": Row("differs", "as for forward"),
    "set_custom_all_gather": Row(
        "differs", "one call per dtype; its buffers are copied. torch's own objects set nothing; ADR 0020"
    ),
    "set_custom_reduce_scatter": Row("differs", "as `set_custom_all_gather`; with a divide factor the operator is SUM"),
    "set_all_reduce_hook": Row(
        "differs",
        "runs when the gradient is handed over: one tensor per dtype, in the dtype of the shard, divided already",
    ),
    "set_post_optim_event": Row("differs", "the current stream waits for the event, too"),
    "set_reduce_scatter_divide_factor": Row("same", "deprecated, here as there"),
    "set_gradient_divide_factor": Row(
        "differs",
        "fp32 and bf16 are divided after the sum, FSDP2 uses NCCL's PreMulSum; one shard is divided once, not twice",
    ),
    "set_force_sum_reduction_for_comms": Row("same"),
    "set_reduce_scatter_unused_params": Row(
        "differs",
        "a graph that reads nothing of a unit, or of what it has in one dtype, trained or frozen, is refused",
        torch="2.13, 2.15",
    ),
    "set_reduce_scatter_max_input_buffers": Row(
        "sets nothing", "the option of `torch.compile` of that name does, 2 by default", torch="2.13, 2.15"
    ),
    "set_separate_reduce_scatter_group": Row("same", torch="2.13, 2.15"),
    "set_unshard_in_backward": Row("sets nothing", "backward gathers what it reads, and nothing else"),
    "set_allocate_memory_from_process_group_for_comm": Row("sets nothing", "Inductor allocates buffers"),
    "set_symm_mem_for_comm": Row("sets nothing", "Inductor allocates buffers", torch="2.13, 2.15"),
}


class Table(NamedTuple):
    """One table of the page: its title, its rows, and what torch and we have of the names."""

    title: str
    rows: Mapping[str, Row]
    theirs: Mapping[str, Any]
    ours: Mapping[str, Any]


def _public(cls: type) -> dict[str, Callable[..., Any]]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_") and callable(value)}


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    return dict(inspect.signature(function).parameters)


def tables() -> Iterator[Table]:
    """Both packages, name by name."""
    yield Table(
        "Functions and classes",
        FUNCTIONS,
        {name: getattr(fsdp2, name) for name in _fully_shard.__all__},
        {name: getattr(fxshard, name) for name in fxshard.__all__},
    )
    yield Table("Arguments of `fully_shard`", ARGUMENTS, _arguments(fsdp2.fully_shard), _arguments(fxshard.fully_shard))
    fields = {field.name: field for field in dataclasses.fields(fsdp2.MixedPrecisionPolicy)}
    yield Table("Fields of `MixedPrecisionPolicy`", POLICY, fields, fields)
    yield Table("Methods of a sharded module", METHODS, _public(fsdp2.FSDPModule), _public(fxshard.ShardedModule))
