"""Several microbatches per step: reduced once, and to the same bits as FSDP2 without gradient sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard.errors import ConfigError, UnsupportedGraph
from fxshard.sharding.sharded_module import ShardedModule, units_under
from tests.numerics.harness import (
    FSDP2,
    Prepare,
    Run,
    Scenario,
    Tools,
    blocks_of,
    check,
    check_against_unsharded,
    check_bitwise,
    check_close,
    check_each,
    check_inductor,
    check_sums_in_few_bits,
    compare,
    compile_each_block,
    fxshard_system,
    only_compile,
    only_shard,
    shard_and_compile,
    start,
    train,
    train_step,
    update,
    with_a_break,
)
from tests.numerics.loops import ScaledLoop
from tests.numerics.microbatches import (
    NUM_MICROBATCHES,
    forwards_ahead,
    in_turn,
    loss_of,
    now_and_then,
    set_sync,
    several,
    total,
    with_no_sync,
)
from tests.numerics.models import (
    MLP,
    CheckpointedMLP,
    ReadTwice,
    rows,
    rows_of_many_sizes,
)
from tests.numerics.scenarios import ONE_BLOCK, REGRESSION, SCENARIOS
from tests.pairwise import slow
from tests.ranks import two_ranks

ACCUMULATION = SCENARIOS["accumulation"]


def clip(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    update(run)


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, only_shard, slow(compile_each_block), slow(with_a_break)])
def test_reduces_and_clips_in_the_last_microbatch(prepare: Prepare) -> None:
    steps = {
        "in turn": replace(ACCUMULATION, update=clip),
        "forwards ahead": replace(REGRESSION, backward=forwards_ahead),
        "interrupted": replace(REGRESSION, backward=interrupted),
    }
    check_each({name: replace(scenario, prepare=prepare) for name, scenario in steps.items()})
    # FSDP2 knows an end of a step that the user declares from torch 2.15 on.
    check_against_unsharded(replace(REGRESSION, backward=ended_by_hand, prepare=prepare), fresh=False)


@pytest.mark.slow
@two_ranks
def test_accumulates_an_embedding_that_is_the_head() -> None:
    check_close(SCENARIOS["accumulation of a tied weight"])


@two_ranks
def test_accumulates_a_parameter_that_is_read_twice() -> None:
    check_close(replace(ACCUMULATION, model=ReadTwice))


@pytest.mark.slow
@two_ranks
def test_accumulates_under_activation_checkpointing() -> None:
    check_close(replace(ACCUMULATION, model=CheckpointedMLP))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("reduce_dtype", [torch.float32, slow(torch.bfloat16), None])
def test_accumulates_in_the_reduce_dtype(reduce_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    check_bitwise(replace(ACCUMULATION, shard_kwargs={"mp_policy": policy}))


@pytest.mark.slow
@two_ranks
def test_rounds_a_sum_once_to_a_reduce_dtype_of_fewer_bits() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for prepare in (shard_and_compile, only_shard):
        check_sums_in_few_bits(replace(ACCUMULATION, shard_kwargs={"mp_policy": policy}, prepare=prepare))


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_accumulates() -> None:
    check_inductor(ACCUMULATION)


def freeze_a_block(model: nn.Module, tools: Tools) -> nn.Module:
    next(iter(blocks_of(model))).requires_grad_(False)
    return shard_and_compile(model, tools)


@two_ranks
def test_leaves_frozen_parameters_alone() -> None:
    check(replace(REGRESSION, backward=several, prepare=freeze_a_block))


@pytest.mark.slow
@two_ranks
def test_accumulates_microbatches_of_different_shapes() -> None:
    check_bitwise(replace(ACCUMULATION, batch=rows_of_many_sizes))


# ---- when and what


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("prepare", [slow(shard_and_compile), only_compile])
def test_no_sync_holds_for_what_runs_inside(prepare: Prepare) -> None:
    check_against_unsharded(replace(REGRESSION, backward=with_no_sync, prepare=prepare))


@pytest.mark.slow
@two_ranks
def test_follows_a_pattern_that_changes() -> None:
    check(replace(REGRESSION, backward=now_and_then))


def zero_in_between(run: Run, step: int) -> Tensor:
    """`zero_grad` drops what was reduced; what waits is no `.grad` yet."""
    set_sync(run.model, False)
    first = loss_of(run, step, 0)
    first.backward()
    if run.system.fully_shard is not None:
        run.optim.zero_grad()
    set_sync(run.model, True)
    second = loss_of(run, step, 1)
    second.backward()
    return (first + second).detach()


@pytest.mark.slow
@two_ranks
def test_zero_grad_leaves_what_waits() -> None:
    check(replace(REGRESSION, backward=zero_in_between))


class Skipping(MLP):
    """Leaves out some of its blocks."""

    skipped: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i not in self.skipped:
                x = block(x)
        return cast(Tensor, self.head(x))


def skip_in_the_last(run: Run, step: int) -> Tensor:
    """The last microbatch does not touch the first block."""

    def loss(i: int) -> Tensor:
        cast(Skipping, getattr(run.model, "_orig_mod", run.model)).skipped = (0,) if i == 1 else ()
        return loss_of(run, step, i)

    return in_turn(run, step, {"requires_gradient_sync": False}, {"requires_gradient_sync": True}, loss=loss)


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, only_shard, slow(compile_each_block)])
def test_reduces_a_unit_that_the_last_backward_does_not_touch(prepare: Prepare) -> None:
    check(replace(ONE_BLOCK, model=partial(Skipping, 1), backward=skip_in_the_last, prepare=prepare))


def interrupted(run: Run, step: int) -> Tensor:
    """A step that fails between its microbatches is given up, and done again."""
    if run.system.ours and step == 1:
        set_sync(run.model, False)
        loss_of(run, step, 0).backward()
        cast(ShardedModule, run.model).reset_iter_state()
    return several(run, step)


def not_the_last(run: Run, step: int) -> Tensor:
    """Two backwards with gradient sync; only the second one is the last."""
    order = [(False, True), (True, False), (True, True)]
    return in_turn(run, step, *({"requires_gradient_sync": sync, "is_last_backward": last} for sync, last in order))


@pytest.mark.slow
@two_ranks
def test_several_backwards_with_sync_add_up() -> None:
    check_against_unsharded(replace(REGRESSION, backward=not_the_last))


def ended_by_hand(run: Run, step: int) -> Tensor:
    """Backwards without gradient sync, and then the end of the step."""
    model, losses = cast(Any, run.model), []
    by_hand = hasattr(model, "finalize_backward")
    if by_hand:
        model.set_manual_backward_finalization(True)
        model.set_is_last_backward(True)  # which means nothing then
    for i in range(2):
        set_sync(run.model, False)
        losses.append(loss_of(run, step, i))
        losses[-1].backward()
        assert by_hand == all(p.grad is None for p in run.model.parameters())
    set_sync(run.model, True)
    if by_hand:
        model.finalize_backward(async_op=True).wait()
    return total(losses)


# ---- what it costs


@two_ranks
def test_only_the_last_microbatch_reduces_accumulators_that_take_one_unsharded_gradient_and_are_kept() -> None:
    run = start(replace(ONE_BLOCK, backward=several), fxshard_system())
    for step in range(2):
        train_step(run, step)
    launched = {graph.kind: graph.collectives for graph in fxshard.compiled_graphs(run.model)}
    assert list(launched) == ["forward", "backward", "backward_accumulate", "backward_final"]
    assert "reduce_scatter" not in launched["backward_accumulate"]
    assert launched["backward_final"] == launched["backward"]
    units = units_under(cast(Any, run.model)._orig_mod)
    buffers = [buffer for unit in units for buffer in unit.step.accumulation._buffers.values()]
    parameters = list(run.model.parameters())
    needed = sum(p.numel() for p in parameters)
    assert needed <= sum(buffer.numel() for buffer in buffers) <= needed + 3 * len(parameters)  # aligned to 16 bytes
    places = [buffer.data_ptr() for buffer in buffers]
    train_step(run, 2)
    again = [buffer for unit in units for buffer in unit.step.accumulation._buffers.values()]
    assert [buffer.data_ptr() for buffer in again] == places
    fxshard.release_accumulators(run.model)
    assert not any(unit.step.accumulation._buffers for unit in units)
    train_step(run, 3)
    run.optim.zero_grad()
    with pytest.raises(KeyboardInterrupt), fxshard.no_sync(run.model):
        raise KeyboardInterrupt
    run.loss(0).backward()
    assert all(parameter.grad is not None for parameter in parameters), "no_sync that an exception left is over"


# ---- what is refused


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, only_shard])
def test_refuses_to_mix_gradients_of_old_and_new_parameters_and_to_release_what_waits(
    prepare: Prepare,
) -> None:
    run = start(replace(ONE_BLOCK, prepare=prepare), fxshard_system())
    with fxshard.no_sync(run.model):
        run.loss(0).backward()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(2.0)
    with pytest.raises(
        UnsupportedGraph, match=r"(?s)changed while gradients of earlier microbatches.*reset_iter_state"
    ):
        run.loss(1).backward()
    with pytest.raises(ConfigError, match=r"gradients of .*blocks\.0.* wait to be reduced"):
        fxshard.release_accumulators(run.model)
    cast(ShardedModule, run.model).reset_iter_state()
    run.optim.zero_grad()
    run.loss(1).backward()


def reduced_by_hand(run: Run, step: int) -> Tensor:
    """All microbatches without sync; what waits is reduced when the user says so."""
    loss = in_turn(run, step, *[{"requires_gradient_sync": not run.system.ours}] * NUM_MICROBATCHES)
    if run.system.ours:
        cast(ShardedModule, run.model).reduce_waiting_gradients()
    return loss


@pytest.mark.slow
@two_ranks
def test_reduces_what_waits_when_asked() -> None:
    check_against_unsharded(replace(REGRESSION, backward=reduced_by_hand))


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_accumulates_what_inductor_has_padded() -> None:
    # Inductor pads long rows of what a forward saves: on GPUs by default, on the CPU if it is told to.
    scenario = Scenario(model=partial(MLP, 1, 520), batch=rows(520, 520), backward=several)
    ours = train(scenario, fxshard_system(lower="inductor", inductor={"disable_padding_cpu": False}))
    compare(ours, train(scenario, FSDP2), rtol=1e-5, atol=1e-6, params=False)


# ---- under a GradScaler


def overflowing(step: int, rank: int) -> tuple[Tensor, ...]:
    """Rows of which one overflows, in a first microbatch of one rank."""
    x, y = rows()(step, rank)
    if (step, rank) == (10, 1):
        y[0, 0] = float("inf")
    return x, y


class ScaledMicrobatches(ScaledLoop):
    """Three microbatches per step."""

    def backward(self, run: Run, step: int) -> Tensor:
        """Run backward of each scaled loss."""
        losses = []
        for i in range(NUM_MICROBATCHES):
            set_sync(run.model, i == NUM_MICROBATCHES - 1)
            losses.append(loss_of(run, step, i))
            self.scaler_of(run).scale(losses[-1]).backward()
        return total(losses)


@pytest.mark.slow
@two_ranks
def test_skips_the_step_in_which_a_microbatch_overflowed() -> None:
    loop = ScaledMicrobatches()
    check(replace(REGRESSION, batch=overflowing, backward=loop.backward, update=loop.update))
