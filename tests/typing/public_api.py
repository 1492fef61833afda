"""What type checkers must see of the public names; mypy checks it, nothing runs it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn
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


def errors_have_one_base(error: fxshard.FxshardError) -> Exception:
    return error
