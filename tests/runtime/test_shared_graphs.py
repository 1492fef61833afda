"""Blocks of equal shape that are compiled one by one share a graph; the ranks compare which block runs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxshard import RankMismatchError, fully_shard
from tests.numerics.harness import EAGER, full
from tests.ranks import two_ranks

WIDTH = 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Experts(nn.Module):
    """As many rows for each expert as the router of a rank says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, rows: list[int]) -> Tensor:
        parts = [expert(part) for expert, part in zip(self.experts, x.split(rows), strict=True)]
        return torch.cat(parts) * self.scale


def sharded_experts() -> Experts:
    model = Experts().double()
    for expert in model.experts:
        fully_shard(expert)
        expert.compile(backend="fxshard", options=EAGER)
    return fully_shard(model)


# By step and rank: how many rows each expert gets. Dynamo compiles 1 row apart from several, so the ranks compile their
# graphs for different experts first.
ROUTES = [
    [[1, 4, 3], [4, 1, 3]],
    [[4, 1, 3], [1, 6, 1]],
    [[2, 5, 1], [3, 3, 2]],
    [[1, 1, 6], [6, 1, 1]],
]


@pytest.mark.slow
@two_ranks
def test_ranks_that_give_experts_different_numbers_of_rows_train_on() -> None:
    model, plain = sharded_experts(), Experts().double()
    for step, routes in enumerate(ROUTES):
        model.zero_grad()
        plain.zero_grad()
        for rank, rows in enumerate(routes):
            x = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
            (plain(x, rows).square().mean() / 2).backward()
            if rank == dist.get_rank():
                model(x, rows).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-9, atol=1e-12)


@two_ranks
@pytest.mark.parametrize("known", [False, True], ids=["a new graph", "a graph that all blocks have run"])
def test_ranks_that_call_different_blocks_of_one_graph_get_an_error(known: bool) -> None:
    model = sharded_experts()
    x = torch.ones(3, WIDTH, dtype=torch.float64)
    for expert in model.experts if known else ():
        expert(x)
    with pytest.raises(RankMismatchError, match=r"(?s)rank 0 .* for experts.0.*rank 1 .* for experts.1"):
        model.experts[dist.get_rank()](x)


class Parts(nn.Module):
    """One unit whose parts are compiled one by one; only the sizes of the first two tell the units apart."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        torch.manual_seed(sum(i * size for i, size in enumerate(sizes)))
        self.first, self.last, self.second = nn.Linear(sizes[0], WIDTH), Expert(), nn.Linear(sizes[1], WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


@two_ranks
@pytest.mark.parametrize("frozen", [False, True])
def test_parts_of_units_that_lie_elsewhere_in_their_units_do_not_share_a_graph(frozen: bool) -> None:
    sizes = [(2, 6), (6, 2)] if not frozen else [(4, 4), (4, 4)]
    models, plain = ([Parts(*each).double() for each in sizes] for _ in range(2))
    for group in (models, plain):
        for i, each in enumerate(group if frozen else []):
            (each.first, each.second)[i].requires_grad_(False)
    for model in models:
        fully_shard(model)
        model.last.compile(backend="fxshard", options=EAGER)
    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(models, plain, strict=True):
        expected = theirs(x)
        found = ours(x)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
        for mine, reference in zip(ours.last.parameters(), theirs.last.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(full(mine.grad), reference.grad)
