"""The models that cases describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.attacks.model_grammar import Case, Part

WIDTH = 4
VOCAB = 7
LENGTH = 3


class Odd(nn.Module):
    """Rows that no two ranks or more can share equally."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Scale(nn.Module):
    """A scalar, which every rank holds whole, and a vector of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


_ROWS, _COLUMNS = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
SPLIT: Mapping[str, ParallelStyle] = {
    "": _ROWS,
    "up": _ROWS,
    "down": _COLUMNS,
    "qkv": _ROWS,
    "out": _COLUMNS,
    "embedding": _COLUMNS,
    "head": _ROWS,
}
"""Linear layer or embedding -> how ranks hold it together; the whole of it where it is a layer by itself."""

LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "odd": Odd,
    "conv": Convolution,
    "attention": Attention,
    "scale": Scale,
}


class DrawnPart(nn.Module):
    """A residual block."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(LAYERS[name]() for name in part.layers))
        self.bfloat16_inside = part.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x.bfloat16() if self.bfloat16_inside else x)
        return x + y.tanh().to(x.dtype)

    def freeze(self, what: str) -> None:
        """Freeze what `Part.frozen` says."""
        for name, parameter in self.named_parameters():
            first = name.startswith("layers.0.")
            if what == "all" or (what == "biases" and name.endswith("bias")) or (what == "first layer" and first):
                parameter.requires_grad_(False)


class DrawnModel(nn.Module):
    """Parts, between an embedding and a head if the case has ends."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.skips = case, False
        self.parts = nn.ModuleList(DrawnPart(part) for part in case.parts)
        self.offset = nn.Parameter(torch.zeros(WIDTH))
        if case.ends:
            self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if case.ends == "tied":
            self.head.weight = self.embedding.weight
        for a, b in case.ties:
            self._linear(b).weight = self._linear(a).weight

    def _linear(self, part: int) -> nn.Linear:
        return cast(nn.Linear, cast(DrawnPart, self.parts[part]).layers[0])

    def forward(self, x: Tensor) -> Tensor:
        x = (self.embedding(x) if self.case.ends else x) + self.offset
        for part, module in zip(self.case.parts, self.parts, strict=True):
            for _ in range(0 if part.skipped and self.skips else 1 + part.twice):
                x = checkpoint(module, x, use_reentrant=False) if part.checkpoint else module(x)
        return cast(Tensor, self.head(x)) if self.case.ends else x


def build(case: Case, dtype: torch.dtype) -> DrawnModel:
    """Make the model: the same one for the same case. In float64 no part is in bfloat16."""
    torch.manual_seed(1)
    model = DrawnModel(case).to(dtype)
    for part, module in zip(case.parts, model.parts, strict=True):
        assert isinstance(module, DrawnPart)
        module.bfloat16_inside = part.bfloat16 and dtype == torch.float32
        if module.bfloat16_inside:
            module.bfloat16()
        module.freeze(part.frozen)
    return model


def split(model: DrawnModel, mesh: DeviceMesh) -> None:
    """Let the ranks of a mesh hold linear layers, and the embedding, together; each gives what it gave as a whole."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            last = name.split(".")[-1]
            parallelize_module(module, mesh, SPLIT["" if last.isdigit() else last])


def batch(case: Case, number: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Make a rank's input of one microbatch."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    if case.ends:
        return torch.randint(VOCAB, (2, LENGTH), generator=generator)
    return torch.randn(2, LENGTH, WIDTH, generator=generator).to(dtype)
