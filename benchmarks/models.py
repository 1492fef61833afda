"""The models that the project is measured on: `fxshard bench benchmarks.models:small`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from benchmarks.llama import Llama, split
from benchmarks.llama import Shape as LlamaShape
from fxshard.tools.bench.task import LossFn

Built = tuple[nn.Module, Tensor, LossFn]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a GPT and of its batch."""

    dim: int
    num_layers: int
    vocab_size: int
    batch_size: int
    num_heads: int = 4
    seq_len: int = 128


TINY = Shape(dim=256, num_layers=4, vocab_size=4096, batch_size=4)  # 5.3M parameters
SMALL = Shape(dim=512, num_layers=8, vocab_size=8192, batch_size=2)  # 33.7M
DEEP = Shape(dim=128, num_layers=32, vocab_size=2048, batch_size=2)  # 6.9M in 32 thin layers
LLAMA = LlamaShape(num_layers=8, dim=512, ffn_dim=1408, num_heads=8, num_kv_heads=4, vocab_size=8192)  # 32M


class Block(nn.Module):
    """A pre-norm transformer block with biases everywhere: many small parameters beside the large ones."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(shape.dim), nn.LayerNorm(shape.dim)
        self.qkv, self.out = nn.Linear(shape.dim, 3 * shape.dim), nn.Linear(shape.dim, shape.dim)
        self.up, self.down = nn.Linear(shape.dim, 4 * shape.dim), nn.Linear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Token ids `[batch, seq]` to logits `[batch, seq, vocab_size]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.dim)
        self.positions = nn.Embedding(shape.seq_len, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy of each token given those before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tiny() -> Built:
    """5.3M parameters, 512 tokens per rank."""
    return _gpt(TINY)


def small() -> Built:
    """33.7M parameters, 256 tokens per rank."""
    return _gpt(SMALL)


def deep() -> Built:
    """6.9M parameters in 32 thin layers: many small transfers."""
    return _gpt(DEEP)


def llama(mesh: DeviceMesh | None = None) -> Built:
    """32M parameters without biases, grouped-query attention; with a mesh its layers are split over that."""
    model = Llama(LLAMA)
    if mesh is not None:
        split(model, mesh)
    return model, torch.randint(LLAMA.vocab_size, (2, 128)), next_token_loss


def _gpt(shape: Shape) -> Built:
    tokens = torch.randint(shape.vocab_size, (shape.batch_size, shape.seq_len))
    return GPT(shape), tokens, next_token_loss
