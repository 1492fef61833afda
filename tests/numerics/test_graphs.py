"""What graphs may look like: breaks, dynamic shapes, recomputation, precision, several forwards before a backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.numerics.harness import (
    NUM_STEPS,
    Prepare,
    Run,
    check,
    check_against_unsharded,
    check_bitwise,
    check_close,
    fxshard_system,
    only_shard,
    shard_and_compile,
    shard_root,
    squared_error,
    train,
)
from tests.numerics.loops import (
    one_backward_through_two_forwards,
    squared_error_under_autocast,
    two_forwards_before_two_backwards,
)
from tests.numerics.models import MLP, WIDTH, Broken, CheckpointedMLP
from tests.numerics.scenarios import ONE_BLOCK, REGRESSION, SCENARIOS, SHAPES
from tests.pairwise import slow
from tests.ranks import two_ranks


class BrokenBetweenReads(Broken):
    """A graph break between two reads of one parameter."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) * self.gain
        torch._dynamo.graph_break()
        return self.blocks[1](x) * self.gain


class Dropped(nn.Module):
    """Dropout, whose masks differ between the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.dropout(block(x), p=0.5)
        return x


class TwoOutputs(nn.Module):
    """A module that takes a dict and a flag, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("mean", "spread")})

    def forward(self, inputs: dict[str, Tensor], *, both: bool) -> dict[str, Tensor]:
        x = torch.tanh(self.trunk(inputs["x"]))
        names = ("mean", "spread") if both else ("mean",)
        return {name: self.heads[name](x) for name in names}


def loss_of_dicts(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model({"x": x}, both=True)
    return (outputs["mean"] - y).square().mean() + outputs["spread"].square().mean()


@two_ranks
def test_trains_across_a_graph_break() -> None:
    check(SCENARIOS["a graph break"])


@pytest.mark.slow
@two_ranks
def test_adds_up_what_two_graphs_give_one_parameter() -> None:
    # Each graph reduces its own part over the ranks; FSDP2 adds the parts first.
    check_close(replace(REGRESSION, model=BrokenBetweenReads))


@two_ranks
def test_trains_with_dicts_as_inputs_and_outputs() -> None:
    check(replace(REGRESSION, model=TwoOutputs, loss=loss_of_dicts))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("dynamic", [None, slow(True), slow(False)])
def test_trains_on_a_batch_and_length_that_change_each_step(dynamic: bool | None) -> None:
    kwargs = {"dynamic": dynamic}
    check(replace(SHAPES, compile_kwargs=kwargs))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize(("dynamic", "most_graphs"), [(True, 1), slow(None, 2), slow(False, NUM_STEPS)])
def test_compiles_no_graph_per_shape_unless_told_to(dynamic: bool | None, most_graphs: int) -> None:
    kwargs = {"dynamic": dynamic, "fullgraph": True}
    counters.clear()
    train(replace(SHAPES, compile_kwargs=kwargs), fxshard_system())
    assert counters["stats"]["unique_graphs"] <= most_graphs, counters["stats"]


@two_ranks
@pytest.mark.parametrize("reshard_after_forward", [True, slow(False), slow(None)])
@pytest.mark.parametrize("prepare", [shard_and_compile, only_shard])
def test_trains_with_activation_checkpointing(prepare: Prepare, reshard_after_forward: bool | None) -> None:
    shard_kwargs = {"reshard_after_forward": reshard_after_forward}
    check(replace(REGRESSION, model=CheckpointedMLP, prepare=prepare, shard_kwargs=shard_kwargs))


@two_ranks
def test_draws_the_dropout_masks_that_fsdp2_draws() -> None:
    check_bitwise(replace(REGRESSION, model=Dropped))


@two_ranks
@pytest.mark.parametrize("reshard_after_forward", [True, slow(None)])
def test_trains_under_bf16_autocast(reshard_after_forward: bool | None) -> None:
    shard_kwargs = {"reshard_after_forward": reshard_after_forward}
    check_bitwise(replace(ONE_BLOCK, loss=squared_error_under_autocast, shard_kwargs=shard_kwargs))


PRECISIONS = {
    "compute in bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "compute in bf16, reduce in fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "reduce in bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "cast no inputs": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
}


def squared_error_in_bf16(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return squared_error(model, x.bfloat16(), y)


@two_ranks
@pytest.mark.parametrize("compiled", [True, slow(False)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_trains_in_mixed_precision(precision: str, compiled: bool) -> None:
    policy = PRECISIONS[precision]
    loss = squared_error if policy.cast_forward_inputs else squared_error_in_bf16
    prepare = shard_and_compile if compiled else only_shard
    check_bitwise(replace(ONE_BLOCK, loss=loss, prepare=prepare, shard_kwargs={"mp_policy": policy}))


@pytest.mark.slow
@two_ranks
def test_returns_the_output_dtype_of_the_policy() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    run = check_bitwise(replace(REGRESSION, prepare=shard_root, shard_kwargs={"mp_policy": policy}))
    assert run.model(run.batch(0)[0]).dtype == torch.float32


@two_ranks
def test_trains_a_bf16_model() -> None:
    check_bitwise(replace(REGRESSION, model=lambda: MLP(1).bfloat16(), loss=squared_error_in_bf16, cast_model=False))


@two_ranks
@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.float16])
@pytest.mark.parametrize("compiled", [True, False])
def test_divides_gradients_as_fsdp2_does_in_each_dtype(compiled: bool, dtype: torch.dtype) -> None:
    """The collective averages float32; float16 is divided before and after it."""
    prepare = shard_and_compile if compiled else only_shard
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    check_bitwise(replace(ONE_BLOCK, prepare=prepare, shard_kwargs={"mp_policy": policy}))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("reshard_after_forward", [True, False, slow(None)])
def test_runs_two_forwards_before_two_backwards(reshard_after_forward: bool | None) -> None:
    shard_kwargs = {"reshard_after_forward": reshard_after_forward}
    scenario = replace(REGRESSION, backward=two_forwards_before_two_backwards, shard_kwargs=shard_kwargs)
    check(scenario)
    check(replace(scenario, prepare=only_shard))


def penalise_the_gradient_of_the_input(run: Run, step: int) -> Tensor:
    x, y = run.batch(step)
    x.requires_grad_()
    loss = (run.model(x) - y).square().mean()
    (grad,) = torch.autograd.grad(loss * x.shape[0], [x], create_graph=True)
    penalty: Tensor = loss + grad.square().mean()
    penalty.backward()
    return penalty


@two_ranks
def test_differentiates_a_gradient_in_eager_mode() -> None:
    scenario = replace(REGRESSION, backward=penalise_the_gradient_of_the_input, prepare=only_shard)
    check_against_unsharded(scenario)


@pytest.mark.slow
@two_ranks
def test_runs_one_backward_through_two_forwards() -> None:
    # FSDP2 reduces units whose inputs need no gradient once for both forwards, the others once for each.
    scenario = replace(REGRESSION, backward=one_backward_through_two_forwards)
    check_close(scenario)
    check_close(replace(scenario, prepare=only_shard))
