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

    def __init__(self, num_blocks: int = 2, width: int = WIDTH, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) if block is None else block() for _ in range(num_blocks))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CheckpointedMLP(MLP):
    """Computes its blocks again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


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
        return self.c(self.b(x))


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
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class GPTBlock(nn.Module):
    """Attention and a residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads=2)
        self.mlp = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return self.mlp(x)


class GPT(nn.Module):
    """A decoder whose embedding and head may share their weight, and whose blocks may be recomputed."""

    def __init__(
        self, *, tied: bool = False, checkpointing: bool = False, width: int = WIDTH, num_blocks: int = 2
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(GPTBlock(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))


def tied_gpt() -> nn.Module:
    """Return a GPT whose embedding is its head."""
    return GPT(tied=True)


class Uneven(nn.Module):
    """Parameters of shapes that two ranks cannot share evenly, some with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(15, 7)
        self.wide = nn.Linear(7, 3, bias=False)
        self.up = nn.Linear(3, 15)
        self.one_row = nn.Linear(15, 1)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.wide(F.gelu(self.narrow(x))))
        return x * self.gain + self.one_row(x)


class TinyUnits(nn.Module):
    """Blocks all of whose parameters have one row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))
        self.head = nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([block(x) for block in self.blocks], dim=-1))


class Scalars(nn.Module):
    """Parameters without any dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * self.scale + self.shift


class LoRA(nn.Module):
    """A frozen linear layer with a trainable update of low rank."""

    def __init__(self, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Tables(nn.Module):
    """Integer buffers and a parameter without gradient."""

    order: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.offset = nn.Parameter(torch.linspace(-1, 1, WIDTH), requires_grad=False)
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        y: Tensor = self.linear(x)
        return (y + self.offset)[:, self.order]


class CalledTwice(nn.Module):
    """One module called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](torch.tanh(self.blocks[0](x)))


class Unused(nn.Module):
    """A block with a parameter that forward does not read, and a block that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.ones(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.blocks[0](x))


class BatchNorm(nn.Module):
    """A norm whose statistics are those of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class AttentionBlock(nn.Module):
    """torch's attention, which reads the weight of its child `out_proj` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return x + y


class SelfAttention(nn.Module):
    """A model with torch's attention in a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AttentionBlock()])
        self.embed = nn.Embedding(32, WIDTH)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.embed(inputs)))


def mlp_with_a_frozen_block() -> nn.Module:
    model = MLP()
    model.blocks[0].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


class Broken(nn.Module):
    """A graph break between two blocks, both of whose graphs read parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) * self.gain
        torch._dynamo.graph_break()
        return self.head(self.blocks[1](x))
