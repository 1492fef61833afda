"""Parameters that stay gathered between microbatches: the same numbers, and fewer gathers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard.errors import ConfigError
from fxshard.runtime import unsharded_cache
from fxshard.sharding.sharded_module import ShardedModule, units_under
from fxshard.testing import emulated_link
from tests.models import Doing, matrix
from tests.numerics.harness import (
    FSDP2,
    Prepare,
    Run,
    Scenario,
    Tools,
    blocks_of,
    check,
    check_bitwise,
    check_inductor,
    compare,
    compile_each_block,
    compile_module,
    fxshard_system,
    only_shard,
    shard_and_compile,
    shard_blocks,
    start,
    train,
    with_a_break,
)
from tests.numerics.microbatches import forwards_ahead, holds, holds_any, kept, set_kept, several
from tests.numerics.models import WIDTH, CheckpointedMLP, rows_of_many_sizes
from tests.numerics.scenarios import CHECKPOINTED, ONE_BLOCK, REGRESSION, TIED
from tests.pairwise import slow
from tests.ranks import two_ranks


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, only_shard, slow(compile_each_block), slow(with_a_break)])
def test_trains_the_same(prepare: Prepare) -> None:
    check(replace(REGRESSION, backward=kept, prepare=prepare))


@pytest.mark.slow
@two_ranks(timeout=240)
def test_compiled_code_trains_the_same() -> None:
    check_inductor(replace(REGRESSION, backward=kept))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("backward", [several, forwards_ahead])
@pytest.mark.parametrize("prepare", [compile_each_block, slow(shard_and_compile)])
def test_trains_the_same_by_budget(prepare: Prepare, backward: Callable[[Run, int], Tensor]) -> None:
    scenario = replace(REGRESSION, backward=backward, prepare=prepare)
    compare(train(scenario, fxshard_system(resident_gib=1)), train(scenario, FSDP2), rtol=0.0, atol=0.0)


READ_AGAIN = {"MLP": replace(REGRESSION, model=CheckpointedMLP), "tied": TIED, "GPT": CHECKPOINTED}


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("name", READ_AGAIN)
def test_trains_the_same_where_parameters_are_read_again(name: str) -> None:
    scenario = replace(READ_AGAIN[name], backward=several)
    with_gathers = train(scenario, fxshard_system())
    compare(train(scenario, fxshard_system(resident_gib=1)), with_gathers, rtol=0.0, atol=0.0)


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("reshard", [True, False])
def test_trains_the_same_in_low_precision(reshard: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    kwargs = {"mp_policy": policy, "reshard_after_forward": reshard}
    check_bitwise(replace(REGRESSION, backward=kept, shard_kwargs=kwargs))


@pytest.mark.slow
@two_ranks
def test_trains_the_same_with_microbatches_of_different_shapes() -> None:
    check_bitwise(replace(REGRESSION, batch=rows_of_many_sizes, backward=kept))


def keep_the_first_block(model: nn.Module, tools: Tools) -> nn.Module:
    shard_blocks(model, tools)
    first, *_ = blocks_of(model)
    first.requires_grad_(False)
    set_kept(first, True)
    return tools.compile(model)


class ReturnsParameters(nn.Module):
    """Hands out its weight, and views and copies of it and of its bias, beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weight, bias = self.linear.weight, self.linear.bias
        return self.linear(x), weight, weight.t()[1:], bias.chunk(2)[1], weight.double().float().t(), bias.clone()


@two_ranks
@pytest.mark.parametrize("lower", ["eager", slow("inductor")])
@pytest.mark.parametrize("grad", [True, False])
def test_what_a_model_returns_of_a_kept_parameter_may_be_written_to(lower: str, grad: bool) -> None:
    model = fxshard.fully_shard(ReturnsParameters())
    set_kept(model, True)
    call, x = compile_module(model, {"lower": lower}), torch.ones(2, WIDTH)
    y, *first = call(x)
    y.sum().backward()
    assert holds_any(model)
    with torch.set_grad_enabled(grad):
        again, *parameters = call(x)
    assert torch.equal(again, y)
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in (*first, *parameters):
        with torch.no_grad():
            parameter.zero_()
    last, *parameters = call(x)
    assert holds_any(model)
    assert torch.equal(last, y)
    assert all(torch.equal(parameter, before) for parameter, before in zip(parameters, kept, strict=True))


@pytest.mark.slow
@two_ranks
def test_one_unit_may_be_kept_and_frozen_while_others_are_not() -> None:
    check(replace(REGRESSION, backward=several, prepare=keep_the_first_block))


class Convolutions(nn.Module):
    """Inductor lays out what these save as it likes, in each variant of the forward."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)) for _ in range(2)]
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.mean((2, 3))


def images(step: int, rank: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 16, 8, 8, generator=generator), torch.randn(2, 16, generator=generator)


@pytest.mark.slow
@two_ranks(timeout=240)
def test_saved_activations_may_lie_otherwise_in_memory() -> None:
    check_inductor(Scenario(model=Convolutions, batch=images, backward=kept))


def pointwise() -> nn.Module:
    """Reads a weight last in a pointwise kernel, which might write its result in the weight's place."""
    layer = nn.Linear(WIDTH, WIDTH)
    return Doing(lambda m, x: (m.layer(x) * m.scale).exp().mean(), layer=layer, scale=matrix(8, WIDTH))


@pytest.mark.parametrize("reshard", [True, slow(False)])
def test_backward_does_not_write_into_what_is_resident(reshard: bool) -> None:
    losses: dict[int, list[Tensor]] = {}
    for resident_gib, lower in enumerate(("eager", "inductor")):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with emulated_link(2) as link:
            model = pointwise()
            fxshard.fully_shard(model, mesh=link.mesh, reshard_after_forward=reshard)
            step, x = compile_module(model, {"resident_gib": resident_gib, "lower": lower}), torch.randn(8, WIDTH)
            with fxshard.no_sync(model):
                losses[resident_gib] = []
                for _ in range(3):
                    loss = cast(Tensor, step(x))
                    loss.backward()
                    losses[resident_gib].append(loss.detach())
    torch._dynamo.reset()
    torch.testing.assert_close(losses[1], losses[0])


# ---- what it saves


def launches(backward: Callable[[Run, int], Tensor], **options: Any) -> dict[str, int]:
    """Collectives of the second step."""
    torch._dynamo.reset()
    with emulated_link(2) as link:
        scenario = replace(ONE_BLOCK, backward=backward, shard_kwargs={"mesh": link.mesh})
        run = start(scenario, fxshard_system(**options))
        backward(run, 0)
        run.optim.step()
        link.clear()
        backward(run, 1)
        ops = [transfer.op for transfer in link.transfers]
    torch._dynamo.reset()
    return {op: ops.count(op) for op in sorted(set(ops))}


def test_gathers_once_per_step() -> None:
    num_units = 2
    once = launches(several, resident_gib=1)
    assert once == launches(kept)
    assert once["all_gather"] == once["reduce_scatter"] == num_units
    assert launches(several)["all_gather"] > 2 * num_units


@pytest.mark.slow
@two_ranks
def test_the_graphs_say_what_is_resident() -> None:
    run = start(REGRESSION, fxshard_system(resident_gib=1))
    several(run, 0)
    graphs = {graph.kind: graph for graph in fxshard.compiled_graphs(run.model)}
    ours = ["forward_resident", "backward_accumulate_resident", "backward_final_resident"]
    assert list(graphs) == ["forward", "backward", *ours]
    assert all("all_gather" not in graphs[name].collectives for name in ours)
    assert "resident_blocks_0_" in graphs["forward_resident"].text


@two_ranks
def test_keeps_what_saves_most_within_the_budget() -> None:
    run = start(REGRESSION, fxshard_system())
    units = units_under(cast(Any, run.model)._orig_mod)
    root, *blocks = units
    one, fit = blocks[0].plan.unsharded_bytes, unsharded_cache.units_that_fit
    assert fit(units, 0) == frozenset()
    assert fit(units, one) == {blocks[0]}, "backward of a block gathers again, the root's does not"
    assert fit(units, sum(unit.plan.unsharded_bytes for unit in units)) == set(units)
    assert root not in fit(units, sum(unit.plan.unsharded_bytes for unit in blocks))


@pytest.mark.slow
@two_ranks
def test_frees_the_parameters_in_the_backward_that_reduces() -> None:
    run = start(REGRESSION, fxshard_system(resident_gib=1))
    with fxshard.no_sync(run.model):
        run.loss(0).backward()
        assert holds(run)
    run.loss(1).backward()
    assert not holds(run)


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("free", ["reshard", "reset_iter_state"])
def test_frees_the_parameters_when_told(free: str) -> None:
    run = start(REGRESSION, fxshard_system())
    set_kept(run.model, True)
    run.loss(0).backward()
    assert holds(run)
    for module in [*blocks_of(run.model), run.model]:
        getattr(module, free)()
    assert not holds(run)


# ---- what is refused


def test_refuses_what_is_no_bool_or_no_size() -> None:
    with emulated_link(2) as link:
        model = nn.Linear(4, 4)
        fxshard.fully_shard(model, mesh=link.mesh)
        with pytest.raises(ConfigError, match="reshard_after_backward must be a bool, got 0"):
            cast(ShardedModule, model).set_reshard_after_backward(cast(bool, 0))
    for wrong in (-1, "1", True, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="resident_gib must be a number of GiB"):
            fxshard.options.parse({"resident_gib": wrong})
    with pytest.raises(ConfigError, match="leaves nothing of memory_budget_gib=2"):
        fxshard.options.parse({"resident_gib": 2, "memory_budget_gib": 2})
