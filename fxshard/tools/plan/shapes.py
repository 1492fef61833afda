"""Shapes of well-known models to plan with, each a model whose forward takes tokens and labels and returns the loss.

Parameters are on the meta device: no shape needs memory. Dimensions are those of the published configurations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fxshard.errors import ConfigError


class DecoderShape(NamedTuple):
    """The dimensions of a decoder.

    "llama" has RMSNorm, rotary positions and a gated feed-forward; "gpt" LayerNorm, learned positions, biases, GELU and
    a tied embedding; "moe" is llama with experts, two for a token, which all get the same number of tokens.
    """

    kind: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    experts: int = 0


SHAPES = {
    "llama3-8b": DecoderShape("llama", 32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": DecoderShape("llama", 80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": DecoderShape("llama", 126, 16384, 128, 8, 53248, 128256),
    "gpt-7b": DecoderShape("gpt", 32, 4096, 32, 32, 16384, 50368),
    "moe-8x7b": DecoderShape("moe", 32, 4096, 32, 8, 14336, 32000, 8),
}
"""Name on the command line -> shape: Llama 3 and Mixtral 8x7B as published, a GPT as MPT-7B."""


def decoder(shape: DecoderShape, sequence: int, checkpointing: str = "none") -> nn.Module:
    """Build the model of a shape on the meta device, for sequences of so many tokens; a key of `CHECKPOINTING`."""
    if checkpointing not in CHECKPOINTING:
        raise ConfigError(f"checkpointing must be one of {', '.join(CHECKPOINTING)}, got {checkpointing!r}.")
    with torch.device("meta"):
        return _Decoder(shape, sequence, CHECKPOINTING[checkpointing])


def inputs(batch: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of `batch` sequences, each `[batch, sequence]`, on the meta device."""
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    return tokens, tokens


class _Decoder(nn.Module):
    def __init__(self, shape: DecoderShape, sequence: int, run: Callable[..., Tensor]) -> None:
        super().__init__()
        is_gpt, width = shape.kind == "gpt", shape.width
        self.embedding = nn.Embedding(shape.vocabulary, width)
        self.positions = nn.Embedding(sequence, width) if is_gpt else None
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = _NORMS[is_gpt](width)
        self.head = None if is_gpt else nn.Linear(width, shape.vocabulary, bias=False)
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.ones(sequence, 1, width // shape.heads), persistent=False)
        self.run = run

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine, self.run)
        logits = F.linear(self.norm(x), self.embedding.weight if self.head is None else self.head.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class _RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


_NORMS: dict[bool, type[nn.Module]] = {True: nn.LayerNorm, False: _RMSNorm}  # of a GPT or not


class _Layer(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width, is_gpt, self.head = shape.width, shape.kind == "gpt", shape.width // shape.heads
        self.rotates = not is_gpt
        self.attention_norm, self.norm = _NORMS[is_gpt](width), _NORMS[is_gpt](width)
        self.query, self.out = nn.Linear(width, width, bias=is_gpt), nn.Linear(width, width, bias=is_gpt)
        self.key, self.value = (nn.Linear(width, shape.kv_heads * self.head, bias=is_gpt) for _ in range(2))
        self.feed_forward = _Experts(shape) if shape.experts else _FeedForward(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, run: Callable[..., Tensor]) -> Tensor:
        return run(self._run, x, cosine, sine)

    def _run(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (project(y).unflatten(-1, (-1, self.head)) for project in (self.query, self.key, self.value))
        if self.rotates:
            q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.feed_forward(self.norm(x))
        return result


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions: each half of a head against the other."""
    y = x.float()
    low, high = y.chunk(2, -1)
    return (y * cosine + torch.cat((-high, low), -1) * sine).type_as(x)


class _FeedForward(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        is_gpt = shape.kind == "gpt"
        self.gate = None if is_gpt else nn.Linear(shape.width, shape.hidden, bias=False)
        self.up, self.down = (
            nn.Linear(shape.width, shape.hidden, bias=is_gpt),
            nn.Linear(shape.hidden, shape.width, bias=is_gpt),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))
        return result


class _Experts(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        count, width, hidden = shape.experts, shape.width, shape.hidden
        self.router = nn.Linear(width, count, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(count, width, hidden)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(count, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        flat, each = x.flatten(0, -2), 2  # experts for a token
        weights, chosen = self.router(flat).softmax(-1).topk(each, -1)
        order = chosen.flatten().argsort()
        rows = flat[order // each].view(self.gate.shape[0], -1, flat.shape[-1])
        y = torch.bmm(F.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up), self.down).flatten(0, 1)
        y = y * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, order // each, y).view_as(x)


_SAVED = (
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
)


def _selected() -> Any:
    """Keep the results of attention and of every other matrix product, as torchtitan's selective checkpointing."""
    products = {True: 0, False: 0}  # whether they are computed again -> how many there were

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        packet = getattr(op, "overloadpacket", None)
        products[ctx.is_recompute] += packet is torch.ops.aten.mm
        keeps = packet in _SAVED or (packet is torch.ops.aten.mm and products[ctx.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CHECKPOINTING: dict[str, Callable[..., Tensor]] = {
    "none": lambda run, *args: run(*args),
    "full": functools.partial(checkpoint, use_reentrant=False),
    "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=_selected),
}
"""What backward computes again: nothing, whole blocks, or all but attention and every other matrix product."""
