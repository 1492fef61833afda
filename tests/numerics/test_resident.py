"""Parameters that stay gathered between microbatches: the same numbers, fewer gathers, and never an old value."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint.state_dict as torch_state
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import ConfigError, UnsupportedGraph
from fxshard.modules import ShardedModule, units_under
from fxshard.runtime import resident
from fxshard.testing import emulated_link
from tests.numerics.harness import (
    FSDP2,
    Run,
    Scenario,
    Tools,
    blocks_of,
    check,
    check_bitwise,
    check_inductor,
    compare,
    fxshard_system,
    only_shard,
    shard_and_compile,
    shard_blocks,
    start,
    train,
    train_step,
)
from tests.numerics.models import MLP, checkpointed_gpt, cross_entropy, rows, tied_gpt, tokens
from tests.numerics.test_accumulation import (
    NUM_MICROBATCHES,
    block_by_block,
    forwards_ahead,
    loss_of,
    of_many_sizes,
    set_sync,
    several,
    with_a_break,
)
from tests.ranks import two_ranks


def set_kept(model: nn.Module, kept: bool) -> None:
    """Keep parameters unsharded after backward, where the system can."""
    if hasattr(model, "set_reshard_after_backward"):
        cast(ShardedModule, model).set_reshard_after_backward(not kept)


def kept(run: Run, step: int) -> Tensor:
    """Three microbatches, the last with gradient sync; parameters stay unsharded until then."""
    losses = []
    for i in range(NUM_MICROBATCHES):
        set_sync(run.model, i == NUM_MICROBATCHES - 1)
        set_kept(run.model, i < NUM_MICROBATCHES - 1)
        losses.append(loss_of(run, step, i))
        losses[-1].backward()
    return torch.stack([loss.detach() for loss in losses]).sum()


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, only_shard, block_by_block, with_a_break])
def test_trains_the_same(prepare: Callable[[nn.Module, Tools], nn.Module]) -> None:
    check(Scenario(model=MLP, batch=rows(), backward=kept, prepare=prepare))


@two_ranks(timeout=240)
def test_compiled_code_trains_the_same() -> None:
    check_inductor(Scenario(model=MLP, batch=rows(), backward=kept))


@two_ranks
@pytest.mark.parametrize("backward", [several, forwards_ahead])
@pytest.mark.parametrize("prepare", [shard_and_compile, block_by_block])
def test_trains_the_same_by_budget(
    prepare: Callable[[nn.Module, Tools], nn.Module], backward: Callable[[Run, int], Tensor]
) -> None:
    scenario = Scenario(model=MLP, batch=rows(), backward=backward, prepare=prepare)
    compare(train(scenario, fxshard_system(resident_gib=1)), train(scenario, FSDP2), rtol=0.0, atol=0.0)


@two_ranks
@pytest.mark.parametrize("model", [tied_gpt, checkpointed_gpt])
def test_trains_the_same_where_parameters_are_read_again(model: Callable[[], nn.Module]) -> None:
    scenario = Scenario(model=model, batch=tokens(), loss=cross_entropy, backward=several)
    with_gathers = train(scenario, fxshard_system())
    compare(train(scenario, fxshard_system(resident_gib=1)), with_gathers, rtol=0.0, atol=0.0)


@two_ranks
@pytest.mark.parametrize("reshard", [True, False])
def test_trains_the_same_in_low_precision(reshard: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    kwargs = {"mp_policy": policy, "reshard_after_forward": reshard}
    check_bitwise(Scenario(model=MLP, batch=rows(), backward=kept, shard_kwargs=kwargs))


@two_ranks
def test_trains_the_same_with_microbatches_of_different_shapes() -> None:
    check_bitwise(Scenario(model=MLP, batch=of_many_sizes, backward=kept))


def keep_the_first_block(model: nn.Module, tools: Tools) -> nn.Module:
    shard_blocks(model, tools)
    first, *_ = blocks_of(model)
    first.requires_grad_(False)
    set_kept(first, True)
    return tools.compile(model)


@two_ranks
def test_one_unit_may_be_kept_and_frozen_while_others_are_not() -> None:
    check(Scenario(model=MLP, batch=rows(), backward=several, prepare=keep_the_first_block))


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


@two_ranks(timeout=240)
def test_saved_activations_may_lie_otherwise_in_memory() -> None:
    scenario = Scenario(model=Convolutions, batch=images, backward=kept)
    ours = train(scenario, fxshard_system(lower="inductor"))
    compare(ours, train(scenario, FSDP2), rtol=1e-4, atol=1e-5, params=False)


# ---- what it saves


def launches(backward: Callable[[Run, int], Tensor], **options: Any) -> dict[str, int]:
    """Collectives of the second step."""
    torch._dynamo.reset()
    with emulated_link(2) as link:
        scenario = Scenario(model=MLP, batch=rows(), backward=backward, prepare=prepare_on(link.mesh))
        run = start(scenario, fxshard_system(**options))
        backward(run, 0)
        run.optim.step()
        link.clear()
        backward(run, 1)
        ops = [transfer.op for transfer in link.transfers]
    torch._dynamo.reset()
    return {op: ops.count(op) for op in sorted(set(ops))}


def prepare_on(mesh: Any) -> Callable[[nn.Module, Tools], nn.Module]:
    def prepare(model: nn.Module, tools: Tools) -> nn.Module:
        for module in (*blocks_of(model), model):
            fxshard.fully_shard(module, mesh=mesh)
        return tools.compile(model)

    return prepare


def test_gathers_once_per_step() -> None:
    num_units = len(list(blocks_of(MLP()))) + 1
    once = launches(several, resident_gib=1)
    assert once == launches(kept)
    assert once["all_gather"] == once["reduce_scatter"] == num_units
    assert launches(several)["all_gather"] > 2 * num_units


@two_ranks
def test_the_graphs_say_what_is_resident() -> None:
    run = start(Scenario(model=MLP, batch=rows()), fxshard_system(resident_gib=1))
    several(run, 0)
    graphs = {graph.kind: graph for graph in fxshard.compiled_graphs(run.model)}
    ours = ["forward_resident", "backward_accumulate_resident", "backward_final_resident"]
    assert list(graphs) == ["forward", "backward", *ours]
    assert all("all_gather" not in graphs[name].collectives for name in ours)
    assert "resident_blocks_0_" in graphs["forward_resident"].text


@two_ranks
def test_keeps_what_saves_most_within_the_budget() -> None:
    run = start(Scenario(model=MLP, batch=rows()), fxshard_system())
    units = units_under(cast(Any, run.model)._orig_mod)
    root, *blocks = units
    one = blocks[0].plan.unsharded_bytes
    assert resident.within(units, 0) == frozenset()
    assert resident.within(units, one) == {blocks[0]}, "backward of a block gathers again, the root's does not"
    assert resident.within(units, sum(unit.plan.unsharded_bytes for unit in units)) == set(units)
    assert root not in resident.within(units, sum(unit.plan.unsharded_bytes for unit in blocks))


def holds(run: Run) -> bool:
    return any(unit.resident.holds for unit in units_under(cast(Any, run.model)._orig_mod))


@two_ranks
def test_frees_the_parameters_in_the_backward_that_reduces() -> None:
    run = start(Scenario(model=MLP, batch=rows()), fxshard_system(resident_gib=1))
    with fxshard.no_sync(run.model):
        run.loss(0).backward()
        assert holds(run)
    run.loss(1).backward()
    assert not holds(run)


@two_ranks
@pytest.mark.parametrize("free", ["reshard", "reset_iter_state"])
def test_frees_the_parameters_when_told(free: str) -> None:
    run = start(Scenario(model=MLP, batch=rows()), fxshard_system())
    set_kept(run.model, True)
    run.loss(0).backward()
    assert holds(run)
    for module in [*blocks_of(run.model), run.model]:
        getattr(module, free)()
    assert not holds(run)


# ---- never old


def with_optimizer(**kwargs: Any) -> Callable[[Run], None]:
    def write(run: Run) -> None:
        torch.optim.AdamW(run.model.parameters(), lr=0.1, **kwargs).step()

    return write


def _scaled(run: Run) -> dict[str, Any]:
    with torch.no_grad():
        return {name: value * 0.5 for name, value in run.model.state_dict().items()}


def load(run: Run) -> None:
    run.model.load_state_dict(_scaled(run))


def load_and_assign(run: Run) -> None:
    run.model.load_state_dict(_scaled(run), assign=True)


def load_by_torch(run: Run) -> None:
    plain = cast(Any, run.model)._orig_mod
    halves: dict[str, Any] = {name: value * 0.5 for name, value in plain.state_dict().items()}
    torch_state.set_model_state_dict(plain, halves)


def copy(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.copy_(parameter * 0.5)


def write_locally(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            cast(DTensor, parameter).to_local().mul_(0.5)
    for module in (*blocks_of(cast(Any, run.model)._orig_mod), run.model):
        cast(ShardedModule, module).reshard()


def replace(run: Run) -> None:
    for module in run.model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach() * 0.5))


WRITES = {
    "for loop": with_optimizer(foreach=False),
    "foreach": with_optimizer(foreach=True),
    "fused": with_optimizer(fused=True),
    "load_state_dict": load,
    "load_state_dict, assign": load_and_assign,
    "set_model_state_dict": load_by_torch,
    "copy_": copy,
    "to_local, reshard": write_locally,
    "another parameter": replace,
}


@two_ranks
@pytest.mark.parametrize("write", WRITES)
def test_sees_every_write(write: str) -> None:
    losses = []
    for keeps in (False, True):
        torch._dynamo.reset()
        run = start(Scenario(model=MLP, batch=rows()), fxshard_system())
        set_kept(run.model, keeps)
        run.loss(0).backward()
        assert holds(run) == keeps
        WRITES[write](run)
        losses.append([run.loss(0).detach(), run.loss(1).detach()])
    assert losses[0] == losses[1]


@two_ranks
def test_refuses_an_optimizer_step_that_would_leave_gradients_behind() -> None:
    run = start(Scenario(model=MLP, batch=rows()), fxshard_system())
    train_step(run, 0)
    before = [cast(DTensor, p).to_local().clone() for p in run.model.parameters()]
    with fxshard.no_sync(run.model):
        run.loss(1).backward()
    with pytest.raises(UnsupportedGraph, match=r"(?s)an optimizer steps while gradients of unit.*reduce_waiting"):
        run.optim.step()
    assert all(torch.equal(cast(DTensor, p).to_local(), x) for p, x in zip(run.model.parameters(), before, strict=True))
    torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).step()  # of another model
    cast(ShardedModule, run.model).reset_iter_state()
    run.optim.step()


@two_ranks
def test_watches_optimizers_only_while_there_is_a_reason_to() -> None:
    hooks = import_module("torch.optim.optimizer")._global_optimizer_pre_hooks
    before = len(hooks)
    run = start(Scenario(model=MLP, batch=rows()), fxshard_system(resident_gib=1))
    with fxshard.no_sync(run.model):
        run.loss(0).backward()
        assert len(hooks) == before + 1
    run.loss(1).backward()
    assert len(hooks) == before


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
