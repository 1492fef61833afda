"""A byte-level GPT of about 5M parameters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxshard.tools.demo.text import VOCAB_SIZE


class Block(nn.Module):
    """A pre-norm transformer block; `num_layers` of the whole model scales what is added to the residual stream."""

    def __init__(self, dim: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)
        for linear in (self.qkv, self.up):
            nn.init.normal_(linear.weight, std=0.02)
        for linear in (self.attention_out, self.down):
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, seq, dim]` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        hidden: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + hidden

    def attention(self, x: Tensor) -> Tensor:
        """Causal self-attention over `[batch, seq, dim]`."""
        batch, seq, dim = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.num_heads, dim // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return out


class GPT(nn.Module):
    """Byte embedding, learned positions, `num_layers` blocks, and a head over the 256 bytes."""

    def __init__(self, max_seq_len: int, dim: int = 256, num_layers: int = 6, num_heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB_SIZE, dim)
        self.positions = nn.Embedding(max_seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, num_layers) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB_SIZE, bias=False)
        for weight in (self.tokens.weight, self.positions.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 `[batch, seq]` to logits `[batch, seq, 256]`."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
