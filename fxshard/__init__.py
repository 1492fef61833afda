"""Fully sharded data parallelism as a compiler backend: `torch.compile(model, backend="fxshard")`."""

from __future__ import annotations

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fxshard.api import (
    CompiledGraph,
    adopt,
    apply_policies,
    compiled_graphs,
    fully_shard,
    no_sync,
    overlap_step,
    register_fsdp_forward_method,
    release,
    release_accumulators,
    share_comm_ctx,
    whole_matrices,
)
from fxshard.compile.backend import fxshard as _backend
from fxshard.compile.dynamo import register_backend as _register_backend
from fxshard.compile.one_line.refusals import guard_optimizers as _guard_optimizers
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
from fxshard.ir.history import PassResult, Remark
from fxshard.passes._base import GraphPass, PassContext, Property
from fxshard.passes.pipeline import Pipeline
from fxshard.plan.compare import compare
from fxshard.runtime.gloo import register as _register_gloo
from fxshard.runtime.prefetcher import UnshardHandle
from fxshard.sharding.fsdp2_settings import GradientReductionHandle
from fxshard.sharding.sharded_module import ShardedModule
from fxshard.state.checkpoint import load_checkpoint, save_checkpoint
from fxshard.state.model_state import full_state_dict, load_full_state_dict
from fxshard.state.optimizer_load import load_full_optim_state_dict
from fxshard.state.optimizer_save import full_optim_state_dict
from fxshard.state.weights import FullWeights, WeightBucket, full_weights

__all__ = [
    "BitDifference",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CompiledGraph",
    "ConfigError",
    "Explanation",
    "FullWeights",
    "FxshardError",
    "GradientReductionHandle",
    "GraphPass",
    "InvariantError",
    "MissingExtraError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PassContext",
    "PassResult",
    "Pipeline",
    "Property",
    "RankMismatchError",
    "Remark",
    "ShardedModule",
    "UnshardHandle",
    "UnsupportedGraph",
    "WeightBucket",
    "adopt",
    "apply_policies",
    "bisect_numerics",
    "compare",
    "compiled_graphs",
    "explain",
    "explanation_of",
    "full_optim_state_dict",
    "full_state_dict",
    "full_weights",
    "fully_shard",
    "load_checkpoint",
    "load_full_optim_state_dict",
    "load_full_state_dict",
    "no_sync",
    "overlap_step",
    "register_fsdp_forward_method",
    "release",
    "release_accumulators",
    "save_checkpoint",
    "share_comm_ctx",
    "whole_matrices",
]

_register_backend(_backend, "fxshard")
_guard_optimizers()
_register_gloo()
