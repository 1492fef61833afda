"""A loss that reads a parameter after forward: FSDP2's root is unsharded then, and so is ours."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial

import fxshard
from fxshard.ir.collectives import ALONE_BYTES
from fxshard.sharding.sharded_module import units_under
from fxshard.tools.bench import traffic
from tests.numerics.harness import EAGER, compile_module, full, sharded_as
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


class Apart(Headless):
    """The root has the head alone: no graph of a forward reads its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.embed, *self.blocks])
        del self.embed

    def forward(self, tokens: Tensor) -> Tensor:
        embed, *blocks = self.blocks
        x: Tensor = embed(tokens)
        for block in blocks:
            x = block(x).relu()
        return x


class Wide(Headless):
    """So large an embedding and a head that the one-line form makes units of them."""

    def __init__(self) -> None:
        super().__init__()
        rows = ALONE_BYTES // (8 * WIDTH) + 1
        self.embed, self.head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, rows, bias=False)


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
    if way == "one line, regional":
        return compile_module(model, {**EAGER, "regional": True}), model
    if way == "inductor":
        return sharded_as(model, "compiled", lower="inductor"), model
    return sharded_as(model, way), model


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


def backward_of_chunks(run: nn.Module, model: Any, tokens: Tensor) -> None:
    """Run a backward for each chunk of a detached hidden state, and one for what comes before it."""
    hidden = run(tokens)
    detached = hidden.detach().requires_grad_()
    for part, words in zip(detached.chunk(2), tokens.chunk(2), strict=True):
        logits = part.flatten(0, 1) @ model.head.weight.t()
        (nn.functional.cross_entropy(logits, words.flatten(), reduction="sum") / tokens.numel()).backward()
    hidden.backward(detached.grad)


def assert_trains_as_unsharded(run: nn.Module, model: Headless, kind: type[Headless]) -> None:
    expected, tokens = mean_grads(kind().double()), tokens_of(dist.get_rank())
    for in_chunks in (False, False, True):
        model.zero_grad()
        if in_chunks:
            backward_of_chunks(run, model, tokens)
        else:
            loss_of(run, model, tokens, chunks=2).backward()
        assert_same(model, expected)
        assert isinstance(model.head.weight, DTensor)


def evaluate(run: nn.Module, model: Any, kind: type[Headless]) -> None:
    """An evaluation reads the parameters, too; what is trained between them changes nothing."""
    plain, tokens = kind().double(), tokens_of(dist.get_rank())
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            for each in range(2):
                torch.testing.assert_close(
                    run(tokens).sum() + model.head.weight.sum(), plain(tokens).sum() + plain.head.weight.sum()
                )
                if kind is not Apart:
                    torch.testing.assert_close(model.embed.weight[each], plain.embed.weight[each].detach())
        loss = run(tokens).sum() + model.head.weight.sum()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()


@two_ranks
@WAYS
@pytest.mark.parametrize("kind", [Headless, Tied, Apart])
def test_a_loss_that_reads_a_root_parameter_gives_the_gradient_of_unsharded_training(
    way: str, kind: type[Headless]
) -> None:
    run, model = sharded(kind, way)
    assert_trains_as_unsharded(run, model, kind)
    evaluate(run, model, kind)


@two_ranks
@pytest.mark.parametrize("way", ["one line", "one line, regional"])
def test_a_loss_reads_the_head_where_it_is_a_unit_of_its_own(way: str) -> None:
    run, model = sharded(Wide, way)
    assert_trains_as_unsharded(run, model, Wide)
    assert {"embed", "head"} < {unit.fqn for unit in units_under(model)}


@two_ranks
@pytest.mark.parametrize("way", ["eager", slow("in parts")])
def test_a_loss_reads_the_head_of_a_root_whose_large_parameters_are_sent_by_themselves(way: str) -> None:
    assert_trains_as_unsharded(*sharded(Wide, way), Wide)


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
    assert isinstance(model.head.weight, DTensor)
    with torch.no_grad():
        run(tokens)
    assert not isinstance(model.head.weight, DTensor)
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
def test_refuses_writes_into_the_unsharded_parameter() -> None:
    tokens = tokens_of(dist.get_rank())
    for ends in ("backward", "forward", "reshard"):
        run, model = sharded(Headless, "compiled")
        hidden = run(tokens)
        with torch.no_grad():
            model.head.weight.mul_(2)
        reshard = cast(Any, model).reshard
        end = {"backward": hidden.sum().backward, "forward": partial(run, tokens), "reshard": reshard}[ends]
        with pytest.raises(
            fxshard.UnsupportedGraph, match=r"(?s)unsharded parameters were changed in place: head.weight"
        ):
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


class WithHead(Headless):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(super().forward(tokens))


@two_ranks
@WAYS
def test_what_forward_has_read_may_be_read_by_the_loss_as_well(way: str) -> None:
    def loss(run: Any, model: Any, tokens: Tensor) -> Tensor:
        return (run(tokens) @ model.head.weight).square().mean() + model.embed.weight.square().mean()

    run, model = sharded(WithHead, way)
    evaluate(run, model, WithHead)
    reference = WithHead().double()
    for rank in range(2):
        (loss(reference, reference, tokens_of(rank)) / 2).backward()
    for _ in range(2):
        model.zero_grad()
        loss(run, model, tokens_of(dist.get_rank())).backward()
        assert_same(model, {name: cast(Tensor, p.grad) for name, p in reference.named_parameters()})
    named = dict(model.named_parameters())
    assert model.head.weight is named["head.weight"]  # after the backward
    run(tokens_of(dist.get_rank()))
    assert not isinstance(model.head.weight, DTensor)
    assert model.get_parameter("head.weight") is named["head.weight"]
    assert isinstance(model.state_dict()["head.weight"], DTensor)
    with pytest.raises(AttributeError, match="no attribute `nothing`"):
        model.get_parameter("head.nothing")


@two_ranks
def test_a_loop_that_generates_gathers_what_it_reads_once() -> None:
    run, model = sharded(Headless, "eager")
    tokens = tokens_of(dist.get_rank())

    def generate(steps: int, *, reads: bool) -> None:
        for _ in range(steps):
            hidden = run(tokens)
            if reads:
                hidden @ model.head.weight.t()

    def gathers(steps: int, *, reads: bool) -> int:
        cast(Any, model).reshard()
        with torch.no_grad():
            return traffic.measure(partial(generate, steps, reads=reads), 8)["all_gather"].launches

    assert gathers(4, reads=True) == gathers(4, reads=False) + 1


@two_ranks
def test_new_values_are_read_after_a_step_or_a_load() -> None:
    run, model = sharded(WithHead, "compiled")
    tokens = tokens_of(dist.get_rank())
    named = dict(model.named_parameters())
    with torch.no_grad():
        for change in (
            lambda: named["head.weight"].mul_(2),
            lambda: model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()}),
            lambda: fxshard.load_full_state_dict(model, fxshard.full_state_dict(model, recipient_rank=None)),
        ):
            run(tokens)
            assert torch.equal(model.head.weight, full(named["head.weight"]))
            change()
            run(tokens)
            assert torch.equal(model.head.weight, full(named["head.weight"]))


@two_ranks
def test_refuses_what_would_be_lost_with_the_unsharded_parameter() -> None:
    for mark in ("hook", "requires_grad"):
        run, model = sharded(Headless, "compiled")
        dict(model.named_parameters())["head.weight"].requires_grad_(mark == "hook")
        hidden = run(tokens_of(dist.get_rank()))
        if mark == "hook":
            model.head.weight.register_hook(lambda grad: grad * 2)
        else:
            model.head.weight.requires_grad_(True)
        with pytest.raises(
            fxshard.UnsupportedGraph, match=r"got hooks or another requires_grad: head.weight\. They would be"
        ):
            hidden.sum().backward()


@two_ranks
def test_a_rank_that_alone_reads_gets_an_error() -> None:
    run, model = sharded(Headless, "compiled")
    hidden = run(tokens_of(dist.get_rank()))
    act = (lambda: model.head.weight) if dist.get_rank() == 0 else hidden.sum().backward
    with pytest.raises(fxshard.RankMismatchError, match=r"(?s)rank 0 \(read\): all_gather .* read after forward"):
        act()
