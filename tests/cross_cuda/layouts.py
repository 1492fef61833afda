"""How a GPT's parameters may lie on the ranks: what a case's model is made into, unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from fxshard.runtime import process_groups
from fxshard.sharding.sharded_module import state_of
from fxshard.tools.demo.gpt import GPT, Block
from tests.numerics.float8 import give_hooks

NUM_EXPERTS, TP, SUBGROUP = 4, 2, 2

Shards = Callable[..., nn.Module]
"""`fully_shard` with all that a case says but the mesh."""

Layout = Callable[[GPT, DeviceMesh, Shards], None]
"""Shards a model over a mesh, or over meshes of its own."""


def by_block(model: GPT, mesh: DeviceMesh, shard: Shards) -> None:
    """Make a unit of each block, and one of the rest."""
    for module in (*model.blocks, model):
        shard(module, mesh=mesh)


def subgroups(model: GPT, mesh: DeviceMesh, shard: Shards) -> None:
    """Share parameters by two ranks between forward and backward."""
    with unset_fake_temporarily():
        process_groups.subgroup_of(mesh, SUBGROUP)
    by_block(model, mesh, partial(shard, reshard_after_forward=SUBGROUP))


def two_groups(model: GPT, mesh: DeviceMesh, shard: Shards) -> None:
    """Reduce on another stream than that of gathers."""
    by_block(model, mesh, shard)
    state = state_of(model)
    assert state is not None
    with unset_fake_temporarily():
        state.nested[0].groups.reduce = dist.new_group([*range(mesh.size())])  # with nobody to agree with
        model.set_separate_reduce_scatter_group()  # type: ignore[operator] # of the class that it is now


def unused(model: GPT, mesh: DeviceMesh, shard: Shards) -> None:
    """Reduce zeros for parameters that no gradient comes to."""
    by_block(model, mesh, shard)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator] # of the class that it is now


def hooked(model: GPT, mesh: DeviceMesh, shard: Shards) -> None:
    """Give what has been averaged over the replicas to a hook."""
    by_block(model, mesh, shard)
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(_halve)


def _halve(grad: Tensor) -> None:
    grad.mul_(0.5)


def encoded(model: GPT, mesh: DeviceMesh, shard: Shards) -> None:
    """Gather the weights of linear layers in fp8."""
    with torch.no_grad():
        give_hooks(model)
    by_block(model, mesh, shard)


def tensor_parallel(model: GPT, mesh: DeviceMesh, shard: Shards) -> None:
    """Cut the feed-forward networks over the ranks of a second axis."""
    whole = _two_axes(mesh, "dp", "tp")
    for block in model.blocks:
        parallelize_module(block, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    by_block(model, whole["dp"], shard)


def expert_parallel(model: GPT, mesh: DeviceMesh, shard: Shards) -> None:
    """Cut the experts over the ranks of an axis, and shard them over the other one alone; all else over all ranks."""
    whole = _two_axes(mesh, "edp", "ep")
    for block in model.blocks:
        assert isinstance(block, Mixing)
        block.experts.spread(whole["ep"])
        shard(block.experts, mesh=whole["edp"])
    by_block(model, mesh, shard)


def _two_axes(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    with unset_fake_temporarily():  # the ranks in it are no fakes
        return init_device_mesh("cuda", (mesh.size() // TP, TP), mesh_dim_names=names)


class Exchanging(Block):
    """A block that has its rows cut by columns for a while, as what is computed along another dimension wants."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, seq, dim]` to the same shape."""
        weight = self.up.weight
        assert isinstance(weight, DTensor)
        mesh = weight.device_mesh
        rows = DTensor.from_local(self.mlp_norm(x), mesh, [Replicate()]).redistribute(mesh, [Shard(1)])
        columns = rows.redistribute(mesh, [Shard(2)])
        softened = F.gelu(columns.to_local()).softmax(1)
        back = DTensor.from_local(softened, mesh, [Shard(2)]).redistribute(mesh, [Shard(1)])
        return super().forward(x + back.full_tensor())


class ExchangingGPT(GPT):
    """A GPT of such blocks."""

    block: type[Block] = Exchanging

    def __init__(self, max_seq_len: int, dim: int = 256, num_layers: int = 6, num_heads: int = 4) -> None:
        super().__init__(max_seq_len, dim, 0, num_heads)
        self.blocks = nn.ModuleList(self.block(dim, num_heads, num_layers) for _ in range(num_layers))


class Experts(nn.Module):
    """Feed-forward networks side by side, of which each rank of a mesh has some once they are spread."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, dim, dim))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, dim, dim))
        self.mesh: Any = None

    def spread(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts."""
        self.mesh = mesh
        for name in ("up", "down"):
            mine: Tensor = getattr(self, name).detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            setattr(self, name, nn.Parameter(mine))

    def forward(self, x: Tensor) -> Tensor:
        """Have each expert compute the tokens that stand at its place."""
        sent, num_ranks = x.flatten(0, -2).unflatten(0, (NUM_EXPERTS, -1)), self.mesh.size() if self.mesh else 1
        arrived = self._exchange(sent).unflatten(0, (num_ranks, -1)).transpose(0, 1)
        out = F.silu(arrived.flatten(1, 2) @ self.up) @ self.down
        back = out.unflatten(1, (num_ranks, -1)).transpose(0, 1).flatten(0, 1)
        return self._exchange(back.contiguous()).view_as(x)

    def _exchange(self, rows: Tensor) -> Tensor:
        if self.mesh is None:
            return rows
        group = self.mesh.get_group()
        return functional.wait_tensor(functional.all_to_all_single_autograd(rows, None, None, group))


class Mixing(Block):
    """A block with experts."""

    def __init__(self, dim: int, num_heads: int, num_layers: int) -> None:
        super().__init__(dim, num_heads, num_layers)
        self.experts = Experts(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, seq, dim]` to the same shape."""
        x = super().forward(x)
        mixed: Tensor = self.experts(x)
        return x + mixed


class MixingGPT(ExchangingGPT):
    """A GPT of such blocks."""

    block = Mixing


class Sparing(GPT):
    """A GPT with a layer in each block that this rank does not run."""

    def __init__(self, max_seq_len: int, dim: int = 256, num_layers: int = 6, num_heads: int = 4) -> None:
        super().__init__(max_seq_len, dim, num_layers, num_heads)
        for block in self.blocks:
            block.aside = nn.Linear(dim, dim)
