"""A Llama with the shape of Llama 3 405B: grouped-query attention, rotary positions, SwiGLU, RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model; the defaults are those of Llama 3 405B."""

    num_layers: int = 126
    dim: int = 16384
    ffn_dim: int = 53248
    num_heads: int = 128
    num_kv_heads: int = 8
    vocab_size: int = 128256
    rope_theta: float = 500000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to `[batch, heads, seq, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with fewer key and value heads than query heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.dim, shape.num_heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.num_heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        hidden = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Llama(nn.Module):
    """Token ids `[batch, seq]` to logits `[batch, seq, vocab_size]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        cos, sin = self.positions(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))

    def positions(self, seq_len: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, `[seq, head_dim]` each."""
        exponents = torch.arange(0, self.shape.head_dim, 2, device=like.device) / self.shape.head_dim
        angles = torch.outer(torch.arange(seq_len, device=like.device), self.shape.rope_theta**-exponents)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def split(model: Llama, mesh: DeviceMesh) -> None:
    """Split heads, features and the vocabulary over the ranks of a mesh, and the sequence where those are whole."""
    whole = PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None))
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": whole,
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in "qkv"},
        "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.gate": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)
