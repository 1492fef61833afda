"""What type checkers must see of the public names; mypy checks it, nothing runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard import CompiledGraph, MixedPrecisionPolicy, ShardedModule, compiled_graphs, fully_shard


class Net(nn.Module):
    """A user's module, with what only it has."""

    blocks: nn.ModuleList


def sharding_keeps_the_type_of_the_module(net: Net, mesh: DeviceMesh) -> None:
    assert_type(fully_shard(net), Net)
    assert_type(fully_shard(net, mesh=mesh, reshard_after_forward=False).blocks, nn.ModuleList)
    assert_type(fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), Net)


def several_modules_make_one_unit(first: nn.Module, second: nn.Module) -> None:
    assert_type(fully_shard([first, second]), list[nn.Module])


def a_sharded_module_is_a_module_with_fsdp_methods(module: nn.Module) -> None:
    assert isinstance(module, ShardedModule)
    module.set_reshard_after_forward(False)


def graphs_are_text_and_counts(net: Net) -> None:
    (graph,) = assert_type(compiled_graphs(net), list[CompiledGraph])
    assert_type(graph.kind, str)
    assert_type(graph.text, str)
    assert_type(graph.collectives, dict[str, int])


def explaining_gives_graphs_by_stage_and_pass(net: Net, x: torch.Tensor) -> None:
    explanation = assert_type(fxshard.explain(net, x, world_size=64, options={"lower": "eager"}), fxshard.Explanation)
    record = explanation.graphs["forward"]["insert_collectives"]
    assert_type(record.graph, fx.Graph)
    assert_type(explanation.diff("captured", "insert_collectives"), str)
    assert_type(fxshard.explanation_of(net), fxshard.Explanation)


def full_state_is_a_plain_dict(net: Net, optim: torch.optim.Optimizer) -> None:
    state = assert_type(fxshard.full_optim_state_dict(net, optim, recipient_rank=None, keys="fqn"), dict[str, Any])
    fxshard.load_full_optim_state_dict(net, optim, state)
    fxshard.load_full_state_dict(net, assert_type(fxshard.full_state_dict(net), dict[str, Any]))


def checkpoints_take_a_path_and_give_back_what_was_added(net: Net, optim: torch.optim.Optimizer) -> object:
    fxshard.save_checkpoint("folder", net, optim, extra={"step": 1})
    fxshard.save_checkpoint(Path("folder"), net)
    return fxshard.load_checkpoint("folder", net)


def errors_have_one_base(error: fxshard.FxshardError) -> Exception:
    return error
