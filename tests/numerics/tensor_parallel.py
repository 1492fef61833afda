"""What is trained with tensor parallelism below, and what is done with such a model besides: bodies of four ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.numerics.harness import (
    FSDP2,
    Batch,
    Scenario,
    Tools,
    check,
    check_bitwise,
    check_inductor,
    compare,
    fxshard_system,
    only_shard,
    shard_blocks,
    train,
    with_a_break,
)
from tests.numerics.loops import clip_and_update
from tests.numerics.microbatches import several

WIDTH, HEADS, TOKENS, VOCABULARY = 8, 4, 4, 10

Body = Callable[[DeviceMesh], object]


class Attention(nn.Module):
    """Self-attention; on a rank of tensor parallelism with some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.feed_norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.feed_norm(x))))
        return out


class Transformer(nn.Module):
    """A decoder in the layout of torchtitan's Llama; the rows of its head are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gathered_sequence() -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split heads and features over the ranks of `mesh`, and the sequence where they are whole."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": gathered_sequence(),
        "blocks.*.attention.wq": ColwiseParallel(),
        "blocks.*.attention.wk": ColwiseParallel(),
        "blocks.*.attention.wv": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.feed_norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
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


def on(mesh: DeviceMesh, prepare: Callable[[nn.Module, Tools], nn.Module] | None = None, **changes: Any) -> Scenario:
    """Return a scenario in which the model is tensor-parallel before it is sharded."""

    def parallelized(model: nn.Module, tools: Tools) -> nn.Module:
        if tools.system.fully_shard is not None:
            parallelize(model, mesh["tp"])
        if prepare is not None:
            return prepare(model, tools)
        shard_blocks(model, tools)
        return tools.compile(model)

    kwargs = {"mesh": data_axes(mesh), **changes.pop("shard_kwargs", {})}
    scenario = Scenario(model=Transformer, batch=tokens_of(mesh), loss=cross_entropy, prepare=parallelized)
    return replace(scenario, shard_kwargs=kwargs, **changes)


def in_float64(scenario: Scenario, *, rtol: float) -> None:
    ours, theirs = (replace(of, dtype=torch.float64) for of in (fxshard_system(), FSDP2))
    compare(train(scenario, ours), train(scenario, theirs), rtol=rtol, atol=rtol)


def parameters_lie_as_those_of_fsdp2(mesh: DeviceMesh) -> None:
    """Also where they are on the dp axis alone, because no style was given for them."""
    models = []
    for system in (fxshard_system(), FSDP2):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Transformer(), nn.Linear(VOCABULARY, 3))
        full = {name: p.detach().clone() for name, p in model.named_parameters()}
        parallelize(model[0], mesh["tp"])
        assert system.fully_shard is not None
        models.append(system.fully_shard(model, mesh=data_axes(mesh)))
    ours, theirs = (dict(model.named_parameters()) for model in models)
    assert ours.keys() == theirs.keys()
    for name, p in ours.items():
        assert (p.device_mesh, p.placements) == (theirs[name].device_mesh, theirs[name].placements), name
        assert torch.equal(p.to_local(), theirs[name].to_local()), name
        assert torch.equal(p.full_tensor(), full[name]), name


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

BODIES: dict[str, Body] = {
    "compiled": lambda mesh: check(on(mesh)),
    "not compiled": lambda mesh: check(on(mesh, prepare=only_shard)),
    "placements": parameters_lie_as_those_of_fsdp2,
    "float32": lambda mesh: check_bitwise(on(mesh)),
    "mixed precision": lambda mesh: check_bitwise(on(mesh, shard_kwargs={"mp_policy": BF16})),
    "accumulation": lambda mesh: in_float64(on(mesh, backward=several), rtol=1e-12),
    "clipped gradients": lambda mesh: check(on(mesh, update=partial(clip_and_update, foreach=None))),
    "kept parameters": lambda mesh: check_bitwise(on(mesh, shard_kwargs={"reshard_after_forward": False})),
    "a graph break": lambda mesh: check(on(mesh, prepare=with_a_break)),
    "inductor": lambda mesh: check_inductor(on(mesh)),
}


def run(shape: tuple[int, ...], *names: str) -> None:
    """Run some bodies on a mesh of that shape, whose last axis is tensor-parallel."""
    mesh = mesh_of(*shape)
    for name in names:
        torch.manual_seed(0)
        try:
            BODIES[name](mesh)
        except Exception as error:
            error.add_note(f"in {name!r}")
            raise
