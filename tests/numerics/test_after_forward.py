"""A loss that reads a parameter after forward: FSDP2's root is unsharded then, and so is ours."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial

import fxshard
from tests.numerics.harness import EAGER, compile_module, full
from tests.pairwise import slow
from tests.ranks import two_ranks

WIDTH, WORDS = 6, 10
WAYS = pytest.mark.parametrize("way", ["compiled", slow("inductor"), "eager", "one line", "in parts"])


class Headless(nn.Module):
    """A model whose head is multiplied by the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x).relu()
        return x


class Tied(Headless):
    """The head is the embedding, which forward reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def tokens_of(rank: int, microbatch: int = 0) -> Tensor:
    return torch.randint(WORDS, (4 + rank, 3), generator=torch.Generator().manual_seed(10 * microbatch + rank))


def loss_of(run: nn.Module, model: Any, tokens: Tensor, chunks: int = 1) -> Tensor:
    """A fused linear cross-entropy: it reads the weight once for each chunk."""
    parts = [
        nn.functional.cross_entropy(hidden.flatten(0, 1) @ model.head.weight.t(), words.flatten(), reduction="sum")
        for hidden, words in zip(run(tokens).chunk(chunks), tokens.chunk(chunks), strict=True)
    ]
    return torch.stack(parts).sum() / tokens.numel()


def sharded(kind: type[Headless], way: str) -> tuple[nn.Module, Headless]:
    model = kind().double()
    if way == "one line":
        return compile_module(model, EAGER), model
    for block in model.blocks:
        fxshard.fully_shard(block)
        if way == "in parts":
            block.compile(backend="fxshard", options=EAGER)
    fxshard.fully_shard(model)
    if way in ("eager", "in parts"):
        return model, model
    return compile_module(model, {"lower": "inductor" if way == "inductor" else "eager"}), model


def mean_grads(model: nn.Module, microbatches: int = 1) -> dict[str, Tensor]:
    """What unsharded training gives: the mean over ranks of the gradients."""
    for rank in range(2):
        for m in range(microbatches):
            (loss_of(model, model, tokens_of(rank, m)) / 2).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = {n.removeprefix("_orig_mod."): full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12)


@two_ranks
@WAYS
@pytest.mark.parametrize("kind", [Headless, Tied])
def test_a_loss_that_reads_a_root_parameter_gives_the_gradient_of_unsharded_training(
    way: str, kind: type[Headless]
) -> None:
    run, model = sharded(kind, way)
    expected = mean_grads(kind().double())
    for _ in range(2):
        model.zero_grad()
        loss_of(run, model, tokens_of(dist.get_rank()), chunks=2).backward()
        assert_same(model, expected)
        assert isinstance(model.head.weight, DTensor)


@two_ranks
@pytest.mark.parametrize("way", ["compiled", "eager"])
def test_microbatches_without_sync_are_reduced_once_with_what_the_loss_reads(way: str) -> None:
    run, model = sharded(Tied, way)
    expected = mean_grads(Tied().double(), microbatches=2)
    with fxshard.no_sync(model):
        loss_of(run, model, tokens_of(dist.get_rank(), 0)).backward()
    loss_of(run, model, tokens_of(dist.get_rank(), 1)).backward()
    assert_same(model, expected)


@two_ranks
def test_is_bitwise_equal_to_fsdp2_where_only_the_loss_reads_it() -> None:
    run, model = sharded(Headless, "compiled")
    reference = Headless().double()
    for part in (*reference.blocks, reference):
        fsdp2(part)
    for each, called in ((reference, reference), (model, run)):
        loss_of(called, each, tokens_of(dist.get_rank())).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(full(ours.grad), full(theirs.grad))


@two_ranks
def test_it_is_sharded_again_where_fsdp2_would_have_new_values() -> None:
    run, model = sharded(Headless, "compiled")
    assert isinstance(model.head.weight, DTensor)
    tokens = tokens_of(dist.get_rank())
    run(tokens)
    assert not isinstance(model.head.weight, DTensor)
    with torch.no_grad():
        dict(model.named_parameters())["head.weight"].mul_(2)
    assert isinstance(model.head.weight, DTensor)
    run(tokens)
    assert torch.equal(model.head.weight, full(dict(model.named_parameters())["head.weight"]))
    with torch.no_grad():
        run(tokens)
    assert not isinstance(model.head.weight, DTensor)
    torch.optim.AdamW(model.parameters(), foreach=True).step()
    with torch.no_grad():
        run(tokens)
    assert isinstance(model.head.weight, DTensor)
    run(tokens)
    assert not isinstance(model.head.weight, DTensor)
    cast(Any, model).reshard()
    assert isinstance(model.head.weight, DTensor)


class Failing(Headless):
    def forward(self, tokens: Tensor) -> Tensor:
        super().forward(tokens)
        raise ArithmeticError


@two_ranks
def test_a_forward_that_failed_leaves_it_sharded() -> None:
    _, model = sharded(Failing, "eager")
    with pytest.raises(ArithmeticError):
        model(tokens_of(dist.get_rank()))
    assert isinstance(model.head.weight, DTensor)


@two_ranks
@pytest.mark.parametrize("ends", ["backward", "forward", "reshard"])
def test_refuses_writes_into_the_unsharded_parameter(ends: str) -> None:
    run, model = sharded(Headless, "compiled")
    tokens = tokens_of(dist.get_rank())
    hidden = run(tokens)
    with torch.no_grad():
        model.head.weight.mul_(2)
    end = {"backward": hidden.sum().backward, "forward": lambda: run(tokens), "reshard": cast(Any, model).reshard}[ends]
    with pytest.raises(fxshard.UnsupportedGraph, match=r"(?s)unsharded parameters were changed in place: head.weight"):
        end()


@two_ranks
def test_of_a_unit_that_was_resharded_full_tensor_with_a_partial_gradient_does_the_same() -> None:
    run, model = sharded(Headless, "compiled")
    cast(Any, model).set_reshard_after_forward(True)

    tokens = tokens_of(dist.get_rank())
    hidden = run(tokens)
    assert isinstance(model.head.weight, DTensor)
    weight = model.head.weight.full_tensor(grad_placements=[Partial("avg")])
    nn.functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), tokens.flatten()).backward()
    assert_same(model, mean_grads(Headless().double()))


@two_ranks
@WAYS
def test_chunks_of_a_detached_hidden_state_have_backwards_of_their_own(way: str) -> None:
    run, model = sharded(Headless, way)
    expected = mean_grads(Headless().double())
    tokens = tokens_of(dist.get_rank())
    hidden = run(tokens)
    detached = hidden.detach().requires_grad_()
    for part, words in zip(detached.chunk(2), tokens.chunk(2), strict=True):
        logits = part.flatten(0, 1) @ model.head.weight.t()
        (nn.functional.cross_entropy(logits, words.flatten(), reduction="sum") / tokens.numel()).backward()
    hidden.backward(detached.grad)
    assert_same(model, expected)


class WithHead(Headless):
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(super().forward(tokens))
        return logits


@two_ranks
@WAYS
def test_what_forward_has_read_is_the_parameter_itself(way: str) -> None:
    """Who looks at it, writes to it or takes its gradient away means the parameter, not a copy."""
    run, model = sharded(WithHead, way)
    tokens = tokens_of(dist.get_rank())
    loss = run(tokens).sum()
    assert model.head.weight is dict(model.named_parameters())["head.weight"]
    loss.backward()
    model.head.weight.grad = None
    assert dict(model.named_parameters())["head.weight"].grad is None
    run(tokens)
    values = full(model.head.weight)
    with torch.no_grad():
        model.head.weight.mul_(2)
    torch.testing.assert_close(full(dict(model.named_parameters())["head.weight"]), values * 2)


@two_ranks
def test_a_rank_that_alone_reads_gets_an_error() -> None:
    run, model = sharded(Headless, "compiled")
    hidden = run(tokens_of(dist.get_rank()))
    act = (lambda: model.head.weight) if dist.get_rank() == 0 else hidden.sum().backward
    with pytest.raises(fxshard.RankMismatchError, match=r"(?s)rank 0 \(read\): all_gather .* read after forward"):
        act()
