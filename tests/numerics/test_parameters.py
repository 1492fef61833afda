"""Parameters of every kind are sharded, gathered and reduced as they should be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.numerics.harness import (
    NUM_STEPS,
    Run,
    Scenario,
    Tools,
    check,
    check_against_unsharded,
    check_bitwise,
    check_close,
    full,
    fxshard_system,
    only_shard,
    start,
    train,
)
from tests.numerics.models import MLP, WIDTH, ReadTwice, cross_entropy, rows, tied_gpt, tokens
from tests.ranks import two_ranks


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
        y: Tensor = x * self.gain + self.one_row(x)
        return y


class TinyUnits(nn.Module):
    """Blocks all of whose parameters have one row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))
        self.head = nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.cat([block(x) for block in self.blocks], dim=-1))
        return y


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
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


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


class Signed(Tables):
    """A parameter of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8) % 2 * 2 - 1, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.signs


class CalledTwice(nn.Module):
    """One module called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks[0](torch.tanh(self.blocks[0](x)))
        return y


class Unused(nn.Module):
    """A block with a parameter that forward does not read, and a block that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.ones(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.blocks[0](x))
        return y


class BatchNorm(nn.Module):
    """A norm whose statistics are those of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y


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
        y: Tensor = self.head(self.blocks[0](self.embed(inputs)))
        return y


class Recurrent(nn.Module):
    """torch's LSTM, which keeps a list of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 7, batch_first=True)
        self.head = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x[:, None])[0][:, 0])
        return y


@two_ranks
def test_trains_uneven_and_tiny_parameters() -> None:
    check(Scenario(model=Uneven, batch=rows(15, 15)))


@two_ranks
def test_trains_units_with_fewer_rows_than_ranks() -> None:
    check(Scenario(model=TinyUnits, batch=rows()))


@two_ranks
def test_trains_scalar_parameters() -> None:
    check_against_unsharded(Scenario(model=Scalars, batch=rows()))


@two_ranks
def test_reduces_a_tied_embedding_and_head_once() -> None:
    check(Scenario(model=tied_gpt, batch=tokens(), loss=cross_entropy))


def mlp_with_a_frozen_block() -> nn.Module:
    model = MLP()
    model.blocks[0].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


@two_ranks
def test_leaves_frozen_parameters_alone() -> None:
    scenario = Scenario(model=mlp_with_a_frozen_block, batch=rows())
    check(scenario)
    assert train(scenario, fxshard_system()).grads["head.bias"] is None


def shard_all_but_the_bias_of_the_head(model: nn.Module, tools: Tools) -> nn.Module:
    assert isinstance(model, MLP)
    for block in model.blocks:
        tools.shard(block)
    tools.shard(model, ignored_params={model.head.bias})
    return tools.compile(model)


@two_ranks
def test_leaves_ignored_parameters_to_their_rank() -> None:
    scenario = Scenario(model=MLP, batch=rows(), prepare=shard_all_but_the_bias_of_the_head)
    check_bitwise(scenario)
    run = start(scenario, fxshard_system())
    assert {name for name, p in run.named_parameters().items() if not isinstance(p, DTensor)} == {"head.bias"}


@two_ranks
def test_trains_a_lora_layer() -> None:
    check(Scenario(model=LoRA, batch=rows()))


def freeze_then_thaw(run: Run, step: int) -> None:
    parameters = run.named_parameters()
    if step == 2:
        assert parameters["head.weight"].grad is None
    if step > 0:
        parameters["blocks.0.up.weight"].requires_grad_(step == 2)
        parameters["head.weight"].requires_grad_(step == 2)


@pytest.mark.slow
@two_ranks
def test_follows_requires_grad_changed_between_steps() -> None:
    check(Scenario(model=MLP, batch=rows(), before_step=freeze_then_thaw))


def remember_buffers(run: Run, step: int) -> None:
    run.extra += [buffer.clone() for buffer in run.model.buffers()]


@two_ranks
def test_keeps_integer_buffers_and_parameters_without_grad() -> None:
    check(Scenario(model=Tables, batch=rows(), before_step=remember_buffers))


@two_ranks
def test_shards_parameters_of_integers() -> None:
    # FSDP2 refuses them in torch 2.11.
    check_against_unsharded(Scenario(model=Signed, batch=rows(), before_step=remember_buffers))


@two_ranks
def test_keeps_batch_norm_statistics_per_rank() -> None:
    check_bitwise(Scenario(model=BatchNorm, batch=rows(), before_step=remember_buffers))


@two_ranks
def test_reduces_a_parameter_read_twice_once() -> None:
    check(Scenario(model=ReadTwice, batch=rows()))


@two_ranks
def test_reduces_the_parameters_of_a_module_called_twice_once() -> None:
    check(Scenario(model=CalledTwice, batch=rows()))


@two_ranks
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_leaves_the_gradient_of_an_unused_parameter_none(reshard_after_forward: bool | None) -> None:
    shard_kwargs = {"reshard_after_forward": reshard_after_forward}
    scenario = Scenario(model=Unused, batch=rows(), shard_kwargs=shard_kwargs)
    check(scenario)
    grads = train(scenario, fxshard_system()).grads
    assert {name for name, grad in grads.items() if grad is None} == {"idle", "blocks.1.weight", "blocks.1.bias"}


@two_ranks
def test_gathers_what_multihead_attention_reads_of_its_child() -> None:
    check(Scenario(model=SelfAttention, batch=tokens(), loss=cross_entropy))


@two_ranks
def test_multihead_attention_works_in_eager_mode() -> None:
    check(Scenario(model=SelfAttention, batch=tokens(), loss=cross_entropy, prepare=only_shard))


@two_ranks
def test_lstm_works_in_eager_mode() -> None:
    check_against_unsharded(Scenario(model=Recurrent, batch=rows(), prepare=only_shard))


def halve_gradients(run: Run, step: int) -> None:
    if step == 0:
        parameters = run.named_parameters()
        parameters["head.weight"].register_hook(lambda grad: grad * 0.5)
        parameters["blocks.0.up.bias"].register_hook(lambda grad: grad * 0.25)


@two_ranks
@pytest.mark.parametrize("compiled", [True, False])
def test_runs_the_gradient_hooks_of_sharded_parameters(compiled: bool) -> None:
    scenario = Scenario(model=MLP, batch=rows(), before_step=halve_gradients)
    if not compiled:
        scenario = Scenario(model=MLP, batch=rows(), before_step=halve_gradients, prepare=only_shard)
    check_against_unsharded(scenario)


def keep_accumulated_gradients(run: Run, step: int) -> None:
    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        run.extra.append(full(parameter.grad))

    if step == 0:
        run.named_parameters()["head.weight"].register_post_accumulate_grad_hook(keep)


@pytest.mark.slow
@two_ranks
def test_runs_the_post_accumulate_hooks_of_sharded_parameters_once_per_backward() -> None:
    scenario = Scenario(model=MLP, batch=rows(), before_step=keep_accumulated_gradients)
    check(scenario)
    assert len(train(scenario, fxshard_system()).extra) == NUM_STEPS


@two_ranks
def test_adds_to_gradients_that_are_there_already() -> None:
    def two_backwards(run: Run, step: int) -> Tensor:
        first = run.loss(step)
        first.backward()
        second = run.loss(step + 10)
        second.backward()
        return first.detach() + second.detach()

    check_close(Scenario(model=MLP, batch=rows(), backward=two_backwards))
