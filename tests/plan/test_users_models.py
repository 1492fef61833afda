"""Plans of what users train beside plain stacks: frozen parts, checkpointed calls of blocks, ops that need a dtype."""

import dataclasses
import functools
from collections.abc import Callable, Collection

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.hardware import load
from fxshard.plan.outline import outline
from fxshard.plan.plan import SCHEDULES, PlanSettings, plan, tokens_of
from fxshard.plan.run import RunCost, cost_of
from tests.pairwise import slow
from tests.plan.models import LAYERS, ROWS, WIDTH, Block, Stack, build

RANKS = 8
DEVICE = load("h100-sxm")


def cost(make: Callable[[], nn.Module], schedule: str = "FSDP2", **changed: float) -> RunCost:
    """A step of a model on eight ranks, in float32."""
    how, device = SCHEDULES[schedule], dataclasses.replace(DEVICE, **changed)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = make()
    options = {**how.options, "hardware": device.to_json()}
    given = outline(model, build()[1], {}, world_size=RANKS, options=options, saves_all=not how.fuses)
    return cost_of(given, device, how, tokens=ROWS, dtype=torch.float32)


# ---- frozen parameters


def frozen(names: Collection[str]) -> nn.Module:
    model = Stack()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


@functools.cache
def without_overheads() -> RunCost:
    return cost(Stack, kernel_overhead=0.0, host_overhead=0.0)


WEIGHT = WIDTH * WIDTH


@pytest.mark.parametrize(
    ("names", "trained", "products"),
    [
        # of each weight: the product, that of its gradient, that of the gradient of its input
        (["blocks"], WEIGHT + RANKS * WIDTH, 3 * WEIGHT + LAYERS * 2 * WEIGHT + 3 * WIDTH),
        (["first", "last"], LAYERS * WEIGHT, WEIGHT + LAYERS * 3 * WEIGHT + 2 * WIDTH),
        (["first", "blocks"], RANKS * WIDTH, WEIGHT + LAYERS * WEIGHT + 2 * WIDTH),
    ],
)
def test_frozen_parameters_have_no_gradient_and_no_state(names: list[str], trained: int, products: int) -> None:
    found, all_trained = cost(lambda: frozen(names), kernel_overhead=0.0, host_overhead=0.0), without_overheads()
    assert found.memory["parameters"] == all_trained.memory["parameters"]
    assert found.memory["optimizer"] == 2 * 4 * trained // RANKS
    assert found.optimizer / all_trained.optimizer == pytest.approx(
        found.memory["optimizer"] / all_trained.memory["optimizer"]
    )
    assert found.flops == 2 * ROWS * products


# ---- checkpoints


class Checkpointed(Stack):
    """A model that computes its blocks again."""

    reentrant = False

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(block, x, use_reentrant=self.reentrant)
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.last(x).sum()


class Reentrant(Checkpointed):
    reentrant = True


def wrapped() -> nn.Module:
    model = Stack()
    model.blocks = nn.ModuleList(torch_private.checkpoint_wrapper(block) for block in model.blocks)
    return model


@pytest.mark.parametrize("schedule", ["fxshard", slow("FSDP2"), slow("FSDP2 compiled")])
def test_a_block_that_the_model_checkpoints_costs_what_one_costs_that_checkpoints_itself(schedule: str) -> None:
    theirs, own, plain = (cost(make, schedule) for make in (Checkpointed, wrapped, Stack))
    assert theirs.seconds == pytest.approx(own.seconds, rel=1e-3)
    assert theirs.flops == own.flops == plain.flops
    assert theirs.peak_bytes == pytest.approx(own.peak_bytes, abs=ROWS * WIDTH * 4)
    assert theirs.compute > plain.compute


def test_a_reentrant_checkpoint_is_named_with_the_fix() -> None:
    with pytest.raises(
        ConfigError, match=r"blocks\.\d is trained, but its forward runs without gradients.*reentrant=F"
    ):
        cost(Reentrant)


class CheckpointedTogether(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        x = self.run(nn.Sequential(*self.blocks[:2]), self.first(x))
        return self.last(self.run(self.blocks[2], x)).sum()


def test_a_checkpoint_around_several_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^blocks\.0, blocks\.1 are called in one checkpoint.*each block by itself"):
        cost(CheckpointedTogether)


class Attending(Block):
    def forward(self, x: Tensor) -> Tensor:
        heads = (x @ self.weight).view(1, 4, ROWS, -1)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).reshape(x.shape)


@pytest.mark.parametrize("base", [Stack, slow(Checkpointed)])
def test_dropout_inside_of_attention_is_refused(base: type[Stack]) -> None:
    def make() -> nn.Module:
        model = base()
        model.blocks = nn.ModuleList(Attending() for _ in range(2))
        return model

    with pytest.raises(ConfigError, match=r"dropout inside of scaled_dot_product_attention.*attention dropout of 0"):
        cost(make)


# ---- what runs where


def test_without_prefetch_no_graph_launches_for_the_next_one() -> None:
    how = dataclasses.replace(SCHEDULES["FSDP2"], options={**SCHEDULES["FSDP2"].options, "prefetch": "off"})
    model, args = build()
    options = {**how.options, "hardware": DEVICE.to_json()}
    given = outline(model, args, {}, world_size=RANKS, options=options, saves_all=True)
    record = cost_of(given, DEVICE, how, tokens=ROWS, dtype=torch.float32).record
    gathers = [each for each in record.launches if "all_gather" in record.label(each)]
    assert len(gathers) == 2 * LAYERS + 1
    assert all(each.needed == each.launched for each in gathers)


class Chain(Block):
    """A product and so many pointwise ops."""

    length = 1

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        for _ in range(self.length):
            x = x.sin()
        return x


class LongChain(Chain):
    length = 5


@pytest.mark.parametrize("schedule", [slow("fxshard"), slow("FSDP2"), "FSDP2 compiled"])
def test_the_host_launches_a_fused_kernel_once(schedule: str) -> None:
    found = []
    for kind in (Chain, LongChain):
        model = Stack()
        model.blocks = nn.ModuleList(kind() for _ in range(LAYERS))
        found.append(cost(lambda model=model: model, schedule, host_overhead=1.0).seconds)  # type: ignore[misc]
    short, long = found
    kernels = 3 * (LongChain.length - Chain.length) * LAYERS  # sin in forward, cos and a product in backward
    assert long - short == pytest.approx(0 if SCHEDULES[schedule].fuses else kernels, abs=0.1)


class Loss(Stack):
    """A loss that Inductor has a decomposition for."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.first(x), torch.zeros(ROWS, dtype=torch.long, device=x.device))


def test_what_is_around_the_blocks_runs_uncompiled_under_every_schedule() -> None:
    found = []
    for schedule in SCHEDULES:
        record = cost(Loss, schedule).record
        found.append([k.work.node.target for k in record.kernels() if not record.runs[k.run].name])
    assert found[0] == found[1] == found[2]
    assert torch.ops.aten._log_softmax.default in found[0]


def test_blocks_run_in_the_dtype_of_their_gathered_parameters() -> None:
    class Picky(Block):
        def forward(self, x: Tensor) -> Tensor:
            assert self.weight.dtype == torch.bfloat16
            return super().forward(x.bfloat16())

    def make(batch: int) -> tuple[nn.Module, tuple[Tensor]]:
        model, args = build(batch)
        with torch.device("meta"):
            model.blocks = nn.ModuleList(Picky() for _ in range(2))
        return model, args

    (run,) = plan(make, world_sizes=[8], batches=[1], settings=PlanSettings(schedules=("FSDP2",))).runs
    assert run.cost.flops > 0


def test_inputs_are_cast_as_the_units_cast_them() -> None:
    """Images in float32 come to parameters in bfloat16; a convolution takes no other dtype than its bias has."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3, padding=1)
            self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(LAYERS))

        def forward(self, images: Tensor) -> Tensor:
            x = self.first(images)
            for block in self.blocks:
                x = block(x.float())
            return x.sum()

    def make(batch: int) -> tuple[nn.Module, tuple[Tensor]]:
        with torch.device("meta"):
            return Images(), (torch.empty(batch, 3, 8, 8),)

    (run,) = plan(make, world_sizes=[8], batches=[2], settings=PlanSettings(schedules=("FSDP2",))).runs
    assert run.cost.flops == 3 * 2 * 2 * 64 * 9 * 4 * (3 + LAYERS * 4)


# ---- buffers


def test_every_rank_holds_all_buffers() -> None:
    class Table(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.empty(ROWS, 1000))

    def with_tables() -> nn.Module:
        model = Stack()
        model.blocks = nn.ModuleList(Table() for _ in range(LAYERS))
        return model

    assert cost(with_tables).peak_bytes - cost(Stack).peak_bytes == LAYERS * ROWS * 1000 * 4


# ---- tokens


def test_a_mask_and_a_number_are_no_tokens() -> None:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    assert tokens_of((torch.ones(2, 1, 16, 16, dtype=torch.bool), torch.tensor(3), tokens)) == 32
