"""Which modules of an unsharded model the one-line form makes units of."""

from __future__ import annotations

import pytest
from torch import nn

from fxshard.compile.one_line.units import units_of
from fxshard.ir.collectives import ALONE_BYTES

WIDTH = 64
ROWS = ALONE_BYTES // (4 * WIDTH)


class Model(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, rows: int, *, blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        embed = nn.Embedding(rows, WIDTH)
        self.inner = nn.ModuleDict({"embed": embed})
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, rows, bias=False)
        if tied:
            self.head.weight = embed.weight


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(ROWS), ["inner.embed", "head", "blocks.0", "blocks.1", ""]),
        (Model(ROWS - 1), ["blocks.0", "blocks.1", ""]),
        (Model(ROWS, tied=True), ["blocks.0", "blocks.1", ""]),
        (Model(ROWS, blocks=0), [""]),
    ],
    ids=["large ends", "small ends", "tied ends", "no blocks"],
)
def test_blocks_and_large_layers_beside_them_are_units(model: Model, expected: list[str]) -> None:
    names = {module: name for name, module in model.named_modules()}
    assert [names[module] for module in units_of(model)] == expected
