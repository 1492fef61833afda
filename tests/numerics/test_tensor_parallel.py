"""Tensor parallelism below: parameters that are DTensors already train as FSDP2 trains them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_leaves

import fxshard
from tests.numerics import mesh_bodies
from tests.numerics.harness import (
    FSDP2,
    Batch,
    Prepare,
    Scenario,
    Tools,
    check,
    check_sums_in_few_bits,
    compare,
    fxshard_system,
    shard_and_compile,
    train,
    with_a_break,
)
from tests.numerics.mesh_bodies import Body
from tests.numerics.microbatches import several
from tests.numerics.scenarios import BF16
from tests.state import processes
from tests.state.states import assert_same

WIDTH, HEADS, TOKENS, VOCABULARY = 8, 4, 4, 10


class Attention(nn.Module):
    """Self-attention; on a rank of tensor parallelism with some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.attention_norm(x))


class Transformer(nn.Module):
    """A decoder in the layout of torchtitan's Llama; the rows of its head are uneven."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gathered_sequence() -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def parallelize(model: nn.Module, mesh: DeviceMesh, embedding: Any = None) -> None:
    """Split heads and features over the ranks of `mesh`, and the sequence where they are whole."""
    plan: dict[str, Any] = {
        "embedding": embedding or RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": gathered_sequence(),
        "blocks.*.attention.wq": ColwiseParallel(),
        "blocks.*.attention.wk": ColwiseParallel(),
        "blocks.*.attention.wv": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)


def mesh_of(*shape: int) -> DeviceMesh:
    names = ("replicate", "shard", "tp") if len(shape) == 3 else ("shard", "tp")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the slice of a mesh that shards, and replicates."""
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]


def tokens_of(mesh: DeviceMesh) -> Callable[[int, int], Batch]:
    """Return batches that the ranks of one tensor-parallel group share."""

    def batch(step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + rank // mesh["tp"].size())
        tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def cross_entropy(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def on(
    mesh: DeviceMesh,
    prepare: Prepare = shard_and_compile,
    embedding: Any = None,
    **changes: Any,
) -> Scenario:
    """Return a scenario in which the model is tensor-parallel before it is sharded."""

    def parallelized(model: nn.Module, tools: Tools) -> nn.Module:
        if tools.system.fully_shard is not None:
            parallelize(model, mesh["tp"], embedding)
        return prepare(model, tools)

    kwargs = {"mesh": data_axes(mesh), **changes.pop("shard_kwargs", {})}
    scenario = Scenario(model=Transformer, batch=tokens_of(mesh), loss=cross_entropy, prepare=parallelized)
    return replace(scenario, shard_kwargs=kwargs, **changes)


def in_float64(scenario: Scenario, *, rtol: float) -> None:
    ours, theirs = (replace(of, dtype=torch.float64) for of in (fxshard_system(), FSDP2))
    compare(train(scenario, ours), train(scenario, theirs), rtol=rtol, atol=rtol)


def parameters_lie_as_those_of_fsdp2(mesh: DeviceMesh) -> None:
    """Also where they are on the axis that shards alone, because no style was given for them."""

    def shard(fully_shard: Any) -> Any:
        torch.manual_seed(0)
        model: Any = plain_model()
        full.update({name: p.detach().clone() for name, p in model.named_parameters()})
        parallelize(model[0], mesh["tp"])
        return fully_shard(model, mesh=data_axes(mesh))

    full: dict[str, Tensor] = {}
    mesh_bodies.lie_as_those_of_fsdp2(shard)
    for name, p in shard(fxshard.fully_shard).named_parameters():
        assert torch.equal(p.full_tensor(), full[name]), name


def plain_model(beside: bool = True) -> nn.Sequential:
    """Return a model with a layer that is not to be tensor-parallel, or without."""
    return nn.Sequential(Transformer(), nn.Linear(VOCABULARY, 3) if beside else nn.Identity())


def sharded(mesh: DeviceMesh, seed: int = 0, beside: bool = True) -> tuple[Any, dict[str, Tensor]]:
    """Return a sharded model, and what its whole parameters were."""
    torch.manual_seed(seed)
    model: Any = plain_model(beside)
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    parallelize(model[0], mesh["tp"])
    for block in model[0].blocks:
        fxshard.fully_shard(block, mesh=data_axes(mesh))
    return fxshard.fully_shard(model, mesh=data_axes(mesh)), full


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # torch stacks no DTensors of two meshes


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has made a step on the model; its state is no zeros."""
    optim = adamw(model)
    model(torch.arange(2 * TOKENS).view(2, TOKENS)).square().sum().backward()
    optim.step()
    optim.zero_grad()
    return optim


def full_state_travels(mesh: DeviceMesh) -> None:
    """To each rank and back; from one rank where it has a part of all, that is without layers of one axis alone."""
    for source in (dist.get_world_size() - 1, None):
        full_state_is_loaded(mesh, source)


def full_state_is_loaded(mesh: DeviceMesh, source: int | None) -> None:
    """Into a model that has other values, and an optimizer that has none."""
    beside, mine = source is None, source in (None, dist.get_rank())
    model, full = sharded(mesh, beside=beside)
    assert_same(dict(fxshard.full_state_dict(model, recipient_rank=None)), full)
    optim = stepped(model)
    weights = fxshard.full_state_dict(model, recipient_rank=None)
    state = fxshard.full_optim_state_dict(model, optim, recipient_rank=None)
    assert not own_memory(model, optim) & {x.untyped_storage().data_ptr() for x in tensors_in((weights, state))}
    plain = plain_model(beside)
    plain.load_state_dict(weights)
    torch.optim.AdamW(plain.parameters()).load_state_dict(state)
    other, _ = sharded(mesh, seed=1, beside=beside)
    other_optim = adamw(other)
    fxshard.load_full_state_dict(other, weights if mine else {})
    fxshard.load_full_optim_state_dict(other, other_optim, state if mine else {})
    for p, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.to_local(), expected.to_local())
        for name, value in other_optim.state[p].items():
            assert getattr(value, "placements", ()) == getattr(optim.state[expected][name], "placements", ())
    assert_same(fxshard.full_optim_state_dict(other, other_optim, recipient_rank=None), state)


def own_memory(model: nn.Module, optim: torch.optim.Optimizer) -> set[int]:
    """Return where parameters lie, and what the optimizer keeps of them."""
    found = [*model.parameters(), *tensors_in(dict(enumerate(optim.state.values())))]
    return {(x.to_local() if isinstance(x, DTensor) else x).untyped_storage().data_ptr() for x in found}


def tensors_in(nested: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def checkpoints_load_on_other_meshes(mesh: DeviceMesh) -> None:
    """Ours and torch's: into the same mesh, into one that is transposed, and into a plain model."""
    model, _ = sharded(mesh)
    others = [lambda seed, shape=shape: sharded(mesh_of(*shape), seed)[0] for shape in ((2, 2), (4, 1))]
    mesh_bodies.checkpoints_load(model, stepped(model), others, adamw, plain_model())


def adopted_and_released(mesh: DeviceMesh) -> None:
    """An FSDP2 model trains on under fxshard, and goes back; with whole parameters it is tensor-parallel as it was."""
    mesh_bodies.adopted_and_released(on, mesh)
    model, full = sharded(mesh)
    whole = dict(fxshard.release(model, whole=True).named_parameters())
    assert whole["0.head.weight"].device_mesh == mesh["tp"]  # type: ignore[attr-defined]
    assert_same({name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in whole.items()}, full)


BODIES: dict[str, Body] = {
    **mesh_bodies.bodies_of(
        on,
        *("not compiled", "block by block", "float32", "clipped gradients", "kept parameters", "inductor"),
    ),
    "compiled": lambda mesh: check(on(mesh, model=partial(Transformer, num_blocks=1))),
    "two blocks": lambda mesh: check(on(mesh)),
    "placements": parameters_lie_as_those_of_fsdp2,
    # FSDP2 of torch 2.15 casts the gradient of a norm before it is summed over the split sequence.
    "mixed precision": lambda mesh: check_sums_in_few_bits(on(mesh, shard_kwargs={"mp_policy": BF16})),
    "accumulation": lambda mesh: in_float64(on(mesh, backward=several), rtol=1e-12),
    "full state": full_state_travels,
    "checkpoints": checkpoints_load_on_other_meshes,
    "adopt and release": adopted_and_released,
    # torch cannot trace an embedding of rows that are split before a graph break: its mask is left behind.
    "a graph break": lambda mesh: check(on(mesh, with_a_break, ColwiseParallel(output_layouts=Shard(1)))),
}


def run(shape: tuple[int, ...], *names: str) -> None:
    """Run some bodies on a mesh of that shape, whose last axis is tensor-parallel."""
    mesh_bodies.run(BODIES, names, mesh_of(*shape))


DEFAULT = ("placements", "compiled", "not compiled")


@pytest.mark.multi_rank
def test_two_by_two_ranks_train_as_fsdp2() -> None:
    processes.run(4, run, (2, 2), *DEFAULT)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BODIES if name not in DEFAULT])
def test_two_by_two_ranks_train_as_fsdp2_also(name: str) -> None:
    processes.run(4, run, (2, 2), name)


@pytest.mark.multi_rank
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 1, 2), (1, 2, 2)])
def test_meshes_of_other_shapes(shape: tuple[int, ...]) -> None:
    processes.run(4, run, shape, "placements", "two blocks")


@pytest.mark.multi_rank
def test_full_states_of_replicas_with_one_shard_are_copies_that_load() -> None:
    processes.run(4, run, (2, 1, 2), "full state")
