"""The small models that the scenarios train, and their batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 12
VOCAB = 32


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * step + rank)


def rows(features: int = WIDTH, outputs: int = WIDTH, count: int = 4) -> Callable[[int, int], tuple[Tensor, ...]]:
    """Return batches of `count` rows of a regression."""

    def batch(step: int, rank: int) -> tuple[Tensor, ...]:
        generator = _generator(step, rank)
        return torch.randn(count, features, generator=generator), torch.randn(count, outputs, generator=generator)

    return batch


def rows_of_many_sizes(step: int, rank: int) -> tuple[Tensor, ...]:
    """Return batches whose number of rows differs from step to step."""
    return rows(count=2 + step % 4)(step, rank)


def tokens(count: int = 2, length: int = 6, vocab: int = VOCAB) -> Callable[[int, int], tuple[Tensor, ...]]:
    """Return batches of `count` sequences of tokens, with the next token of each."""

    def batch(step: int, rank: int) -> tuple[Tensor, ...]:
        text = torch.randint(vocab, (count, length + 1), generator=_generator(step, rank))
        return text[:, :-1], text[:, 1:]

    return batch


def tokens_of_many_shapes(step: int, rank: int) -> tuple[Tensor, ...]:
    """Return batches whose two sizes differ from step to step, and from each other."""
    return tokens(count=2 + step, length=10 + 2 * step)(step, rank)


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the model's logits."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class MLP(nn.Module):
    """Blocks and a head; the scenario model for everything that is not about the model."""

    def __init__(self, num_blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class CheckpointedMLP(MLP):
    """Computes its blocks again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        y: Tensor = self.head(x)
        return y


class ReadTwice(nn.Module):
    """One parameter in two products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t()


class ReadOnBothSides(nn.Module):
    """Reads `b` on both sides of a graph break; one unit of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        torch._dynamo.graph_break()
        y: Tensor = self.c(self.b(x))
        return y


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class GPTBlock(nn.Module):
    """Attention and a residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads=2)
        self.mlp = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y: Tensor = self.mlp(x)
        return y


class GPT(nn.Module):
    """A decoder whose embedding and head may share their weight, and whose blocks may be recomputed."""

    def __init__(self, *, tied: bool = False, checkpointing: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(GPTBlock(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def tied_gpt() -> nn.Module:
    """Return a GPT whose embedding is its head."""
    return GPT(tied=True)


def checkpointed_gpt() -> nn.Module:
    """Return a GPT whose blocks are recomputed in backward."""
    return GPT(checkpointing=True)
