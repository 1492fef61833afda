"""Fully sharded data parallelism as a compiler backend: `torch.compile(model, backend="fxshard")`."""

from __future__ import annotations

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fxshard.api import CompiledGraph, compiled_graphs, fully_shard, no_sync, release_accumulators
from fxshard.backend import fxshard as _backend
from fxshard.capture import register_backend as _register_backend
from fxshard.checkpoint.full import (
    full_optim_state_dict,
    full_state_dict,
    load_full_optim_state_dict,
    load_full_state_dict,
)
from fxshard.checkpoint.store import load_checkpoint, save_checkpoint
from fxshard.errors import (
    CheckpointError,
    ConfigError,
    FxshardError,
    InvariantError,
    MissingExtraError,
    RankMismatchError,
    UnsupportedGraph,
)
from fxshard.inspect.bisect import BitDifference, bisect_numerics
from fxshard.inspect.explain import explain, explanation_of
from fxshard.inspect.explanation import Explanation
from fxshard.ir.journal import Decline, Record
from fxshard.modules import ShardedModule
from fxshard.one_line import guard_optimizers as _guard_optimizers
from fxshard.passes._base import Fact, GraphPass, PassContext
from fxshard.passes.pipeline import Pipeline
from fxshard.runtime.gloo import register as _register_gloo

__all__ = [
    "BitDifference",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CompiledGraph",
    "ConfigError",
    "Decline",
    "Explanation",
    "Fact",
    "FxshardError",
    "GraphPass",
    "InvariantError",
    "MissingExtraError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PassContext",
    "Pipeline",
    "RankMismatchError",
    "Record",
    "ShardedModule",
    "UnsupportedGraph",
    "bisect_numerics",
    "compiled_graphs",
    "explain",
    "explanation_of",
    "full_optim_state_dict",
    "full_state_dict",
    "fully_shard",
    "load_checkpoint",
    "load_full_optim_state_dict",
    "load_full_state_dict",
    "no_sync",
    "release_accumulators",
    "save_checkpoint",
]

_register_backend(_backend, "fxshard")
_guard_optimizers()
_register_gloo()
