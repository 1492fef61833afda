"""Which module runs may hang on a rank's data: an error where the ranks differ, right where all call all."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard import RankMismatchError
from fxshard.ir.collectives import ALONE_BYTES
from tests.models import Towers
from tests.numerics.harness import compile_module, full, sharded, sharded_as
from tests.pairwise import slow
from tests.ranks import fresh_ranks, two_ranks

WAYS = pytest.mark.parametrize("way", ["compiled", "in parts", "eager", "one line"])


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))


def built(way: str, lower: str = "eager") -> tuple[Any, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    plain = Towers()
    model = copy.deepcopy(plain)
    made = sharded_as(model, way, parts=model.children(), lower=lower)
    if way == "one line":
        made(batch(0, 0), "image")  # shards
    return plain, made, torch.optim.SGD(model.parameters(), lr=0.1)


@contextmanager
def refused_late() -> Iterator[None]:
    """Expect what a rank says where rank 0 ran the tower for images, and rank 1 that for text."""
    with pytest.raises(RankMismatchError) as caught:
        yield
    text = str(caught.value)
    assert "the ranks launch different collectives" in text
    for line in ("    rank 0 .*image", "    rank 1 .*text"):
        assert any(re.match(line, each) for each in text.splitlines()), text
    assert "call all of them on every rank, in one order" in text
    assert "drop them before the optimizer steps" in text


@two_ranks
@WAYS
@pytest.mark.parametrize("lower", ["eager", slow("inductor")])
def test_another_tower_on_each_rank_is_an_error_before_the_optimizer_steps(way: str, lower: str) -> None:
    """Train while the ranks go alike through every transition, then let each call another tower."""
    rank = dist.get_rank()
    _, model, optimizer = built(way, lower)
    for step, which in enumerate(("image", "image", "text", "text", "image")):
        model(batch(step, rank), which).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = model(batch(9, rank), ("image", "text")[rank]).square().mean()
    with refused_late():
        loss.backward()
    optimizer.zero_grad()
    for step in range(2):  # those who catch it may go on
        model(batch(step, rank), "text").square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@two_ranks
@pytest.mark.parametrize("way", ["compiled", "in parts", "eager"])  # in one line so small a model is one unit
def test_another_tower_in_an_evaluation_is_an_error_where_its_forward_ends(way: str) -> None:
    rank = dist.get_rank()
    _, model, _ = built(way)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for which in ("image", "image", "text", "text", "image"):
                model(batch(0, rank), which)
            with refused_late():
                model(batch(0, rank), ("image", "text")[rank])


@two_ranks
@pytest.mark.parametrize("way", ["in parts", "eager"])
def test_another_tower_of_which_only_the_backward_differs(way: str) -> None:
    """Both ranks call both towers, and a loss has a gradient for one."""
    rank = dist.get_rank()
    _, model, _ = built(way)

    def train(which: str) -> None:
        outputs = {"image": model.image(batch(0, rank)), "text": model.text(batch(1, rank))}
        outputs[which].square().mean().backward()

    for which in ("image", "text", "text", "image", "image"):
        train(which)
    with refused_late():
        train(("image", "text")[rank])


@two_ranks
@WAYS
def test_towers_that_all_ranks_call_train_as_unsharded_whichever_has_rows(way: str) -> None:
    rank = dist.get_rank()
    plain, model, optimizer = built(way)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, words in enumerate(("image image", "text image", "image text", "text text", "image text")):
        names = words.split()
        model(batch(step, rank), names[rank], always=True).square().mean().backward()
        sum(plain(batch(step, r), names[r], always=True).square().mean() / 2 for r in range(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    expected = dict(plain.named_parameters())
    for name, found in getattr(model, "_orig_mod", model).named_parameters():
        torch.testing.assert_close(found.full_tensor(), expected[name].data, rtol=1e-5, atol=1e-6)


@two_ranks
@WAYS
def test_towers_that_the_ranks_choose_alike_are_no_difference(way: str) -> None:
    rank = dist.get_rank()
    _, model, optimizer = built(way)
    for step, which in enumerate(("image", "text", "text", "image", "image", "text")):
        model(batch(step, rank), which).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(batch(step, rank), "text" if step < 3 else "image")


class Optional(nn.Module):
    """A layer that only some batches need, before one of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.extra, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, needed: bool) -> Tensor:
        x = self.stem(x)
        return self.head(self.extra(x) if needed else x)


@two_ranks
@pytest.mark.parametrize("needed_last", [True, False])
def test_collectives_of_unlike_sizes_outside_of_graphs_do_not_meet(needed_last: bool) -> None:
    """Of every order that the ranks know; gloo ends a process in which such collectives meet."""
    rank, model = dist.get_rank(), Optional()
    mesh = DeviceMesh.from_group(dist.new_group(backend="fxshard_gloo"), "cpu")  # it is of no use afterwards
    for part in (*model.children(), model):
        fxshard.fully_shard(part, mesh=mesh)
    for step, needed in enumerate((True, False, True, False, False, True, needed_last)):
        model(batch(step, rank), needed).square().mean().backward()
        model.zero_grad()
    with pytest.raises(RankMismatchError, match=r"(?s)rank 0 .*rank 1 "):
        model(batch(9, rank), rank == 0).square().mean().backward()


class TwoLarge(nn.Module):
    """Two parameters that are each gathered and reduced by themselves."""

    def __init__(self, equal: bool) -> None:
        super().__init__()
        rows = ALONE_BYTES // 16
        self.first, self.second = nn.Linear(8, rows, bias=False), nn.Linear(8, rows if equal else 2 * rows, bias=False)

    def forward(self, x: Tensor, order: int) -> Tensor:
        for layer in (self.first, self.second)[:: 1 - 2 * order]:
            x = layer(x).square()[..., :8]
        return x


@fresh_ranks  # one rank raises a reduction later than the other
@pytest.mark.parametrize(("equal", "known"), [(False, True), (True, True), slow(False, False)])
def test_large_parameters_in_another_order_on_each_rank_are_an_error(equal: bool, known: bool) -> None:
    torch.manual_seed(0)
    rank, model = dist.get_rank(), TwoLarge(equal)
    fxshard.fully_shard(model)
    for step, order in enumerate((0, 1, 1, 0, 0, 1) if known else (0, 0)):
        model(batch(step, rank), order).square().mean().backward()
        model.zero_grad()
    with pytest.raises(RankMismatchError, match=r"(?s)rank 0 .*rank 1 "):
        model(batch(9, rank), rank).square().mean().backward()


class _Paths(nn.Module):
    """Calls some of its blocks, as it is told, and multiplies by a parameter of its own before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, path: Iterable[int]) -> Tensor:
        x = x * self.scale
        for i in path:
            x = self.blocks[i](x)
        return x


@two_ranks
def test_ranks_guess_alike_where_one_compiles_for_its_batch_and_all_leave_a_block_out() -> None:
    torch.manual_seed(0)
    plain = _Paths().double()
    model = sharded(copy.deepcopy(plain))
    run = compile_module(model, {"lower": "eager", "regional": True})
    for step, (path, rows) in enumerate([((0, 1, 2), (2, 2)), ((0, 1, 2), (2, 2)), ((1, 2), (2, 3)), ((1, 2), (2, 3))]):

        def loss(net: nn.Module, rank: int, step: int = step, path: Any = path, rows: Any = rows) -> Tensor:
            x = batch(step, rank)[: rows[rank]].double()
            return net(x, path).square().mean() + net(x + 1, path).square().mean()  # two forwards, one backward

        loss(run, dist.get_rank()).backward()
        for rank in range(2):
            (loss(plain, rank) / 2).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            actual = torch.zeros_like(theirs) if ours.grad is None else full(ours.grad)
            torch.testing.assert_close(actual, expected)
            ours.grad = theirs.grad = None
