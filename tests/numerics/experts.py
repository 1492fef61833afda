"""A mixture of experts on two meshes: the model, how it is made expert-parallel, and its scenarios.

All ranks have tokens of their own. The ranks of "ep" have some of the experts each, and send each other the tokens
that these are to see. So the experts are sharded over "fsdp" alone, and everything else over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from fxshard import torch_fsdp2
from tests.numerics.harness import FSDP2, Prepare, Scenario, Tools, blocks_of, shard_and_compile
from tests.numerics.models import VOCAB, WIDTH, Attention, cross_entropy, tokens

NUM_EXPERTS, HIDDEN, TOP = 4, 8, 2


def local(parameter: Tensor) -> Tensor:
    """Return what this rank has of a parameter of experts."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Experts(nn.Module):
    """Feed-forward networks side by side; on a rank of expert parallelism some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor, counts: list[int] | None = None) -> Tensor:
        """Run rows that are sorted by expert, `counts` for each; without counts, as many for each in a batch."""
        up, down = local(self.up), local(self.down)
        if counts is None:
            return F.silu(x @ up) @ down
        parts = x.split(counts)
        return torch.cat([F.silu(part @ up[i]) @ down[i] for i, part in enumerate(parts)])


class MoE(nn.Module):
    """Sends each token to the experts that its router chooses, wherever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = Experts()
        self.group: Any = None  # of expert parallelism
        self.num_ranks = 1

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of the chosen experts of each token, and which these are."""
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        return weights, chosen

    def exchange(self, x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        """Send each rank of expert parallelism its part of the rows."""
        if self.group is None:
            return x
        return collectives.wait_tensor(collectives.all_to_all_single(x, received, sent, self.group))


class DroplessMoE(MoE):
    """Each rank sends as many tokens as its router says: sizes are known to the data alone."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.route(rows)
        order = chosen.flatten().argsort(stable=True)
        of_token = order // TOP
        counts = F.one_hot(chosen.flatten(), NUM_EXPERTS).sum(0)  # by expert
        theirs = self.exchange(counts).view(self.num_ranks, -1)  # by sender and expert of this rank
        sent, received = counts.view(self.num_ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
        arrived = self.exchange(rows[of_token], received, sent)
        expert_of = torch.arange(theirs.shape[1]).repeat(self.num_ranks)
        by_expert = expert_of.repeat_interleave(theirs.flatten(), output_size=arrived.shape[0]).argsort(stable=True)
        out = self.experts(arrived[by_expert], theirs.sum(0).tolist())
        returned = self.exchange(torch.empty_like(out).index_copy(0, by_expert, out), sent, received)
        weighted = returned * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, of_token, weighted).view_as(x)


class DenseMoE(MoE):
    """Each expert gets a place for every token, and zeros where the token is not for it: sizes are known."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.route(rows)
        gates = torch.zeros(rows.shape[0], NUM_EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
        is_chosen = (gates > 0).to(x.dtype)
        sent = torch.einsum("te,td->etd", is_chosen, rows)
        arrived = self.exchange(sent).unflatten(0, (self.num_ranks, -1)).transpose(0, 1)  # expert, sender, token
        out = self.experts(arrived.flatten(1, 2)).unflatten(1, (self.num_ranks, -1)).transpose(0, 1)
        returned = self.exchange(out.flatten(0, 1).contiguous())
        return torch.einsum("te,etd->td", gates, returned).view_as(x)


class Block(nn.Module):
    """Attention, and a mixture of experts."""

    def __init__(self, kind: type[MoE]) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention(WIDTH, heads=2)
        self.norm, self.moe = nn.LayerNorm(WIDTH), kind()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = self.moe(self.norm(x))
        return x + y


class Mixtral(nn.Module):
    """A decoder whose feed-forward networks are mixtures of experts."""

    def __init__(self, kind: type[MoE], num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Meshes:
    """Which ranks share what."""

    ep: DeviceMesh  # have some of the experts each
    experts: DeviceMesh  # share the parameters of the same experts
    dense: DeviceMesh  # share everything else


def meshes_of(fsdp: int, ep: int) -> Meshes:
    """Return the meshes of `fsdp * ep` ranks, of which those next to each other have different experts."""
    both = init_device_mesh("cpu", (fsdp, ep), mesh_dim_names=("fsdp", "ep"))
    return Meshes(both["ep"], both["fsdp"], init_device_mesh("cpu", (fsdp * ep,), mesh_dim_names=("dp",)))


def parallelize(model: nn.Module, mesh: DeviceMesh, *, local_experts: bool = False) -> None:
    """Give each rank of `mesh` its experts, as DTensors or as tensors of its own."""
    for moe in (module for module in model.modules() if isinstance(module, MoE)):
        moe.group, moe.num_ranks = mesh.get_group(), mesh.size()
        for name, parameter in list(moe.experts.named_parameters()):
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            moe.experts.register_parameter(name, nn.Parameter(part.to_local().clone() if local_experts else part))


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer that takes parameters one by one: torch stacks no DTensors of two meshes."""
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def on(
    meshes: Meshes,
    kind: type[MoE] = DenseMoE,
    prepare: Prepare = shard_and_compile,
    *,
    expert_kwargs: Mapping[str, Any] = MappingProxyType({}),
    by_torch: bool = False,
    local_experts: bool = False,
    **changes: Any,
) -> Scenario:
    """Return a scenario in which the experts are on a mesh of their own; each rank has tokens of its own.

    Args:
        meshes: which ranks share what.
        kind: of the mixture of experts.
        prepare: shards the rest, and compiles.
        expert_kwargs: of the experts' fully_shard.
        by_torch: whether ours is sharded by FSDP2 first, too.
        local_experts: whether experts are no DTensors.
        **changes: of the scenario.
    """

    def parallelized(model: nn.Module, tools: Tools) -> nn.Module:
        if by_torch:
            tools = replace(
                tools, system=replace(tools.system, fully_shard=tools.system.fully_shard and FSDP2.fully_shard)
            )
        if tools.system.fully_shard is not None:
            parallelize(model, meshes.ep, local_experts=local_experts)
            for experts in experts_of(model):
                tools.shard(experts, **{"mesh": meshes.experts, **expert_kwargs})
                divide_by_all_ranks(experts)
        return prepare(model, tools)

    kwargs = {"mesh": meshes.dense, **changes.pop("shard_kwargs", {})}
    changes = {"optimizer": adamw, **changes}
    scenario = Scenario(model=partial(Mixtral, kind), batch=tokens(), loss=cross_entropy, prepare=parallelized)
    return replace(scenario, shard_kwargs=kwargs, **changes)


def on_their_own_mesh(meshes: Meshes, prepare: Prepare = shard_and_compile, **changes: Any) -> Scenario:
    """Return a scenario in which experts are no modules that are sharded: their parameters have a mesh of their own."""
    own = torch_fsdp2.placement_on(meshes.experts)(0)

    def placement(parameter: nn.Parameter) -> Any:
        return own if isinstance(parameter, DTensor) else None

    def parallelized(model: nn.Module, tools: Tools) -> nn.Module:
        if tools.system.fully_shard is not None:
            parallelize(model, meshes.ep)
            for block in blocks_of(model):
                tools.shard(block, shard_placement_fn=placement)
                divide_by_all_ranks(block)
        return prepare(model, tools)

    return replace(on(meshes), prepare=parallelized, **changes)


def experts_of(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def divide_by_all_ranks(module: Any) -> None:
    """Tokens of all ranks have come here: their gradients are no sums over the ranks of the experts' mesh alone."""
    module.set_gradient_divide_factor(float(dist.get_world_size()))
    module.set_force_sum_reduction_for_comms(True)  # FSDP2 has NCCL divide by a factor, and gloo cannot
