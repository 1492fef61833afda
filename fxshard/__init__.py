"""Fully sharded data parallelism as a compiler backend: `torch.compile(model, backend="fxshard")`."""

from __future__ import annotations

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fxshard.api import compiled_graphs, fully_shard
from fxshard.backend import fxshard as _backend
from fxshard.capture import register_backend as _register_backend
from fxshard.errors import ConfigError, FxshardError, InvariantError, MissingExtraError, UnsupportedGraph
from fxshard.modules import ShardedModule
from fxshard.one_line import guard_optimizers as _guard_optimizers
from fxshard.runtime.frame import CompiledGraph

__all__ = [
    "CPUOffloadPolicy",
    "CompiledGraph",
    "ConfigError",
    "FxshardError",
    "InvariantError",
    "MissingExtraError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedModule",
    "UnsupportedGraph",
    "compiled_graphs",
    "fully_shard",
]

_register_backend(_backend, "fxshard")
_guard_optimizers()
