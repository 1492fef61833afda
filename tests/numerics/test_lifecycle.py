"""From an empty model to a checkpoint: initialisation, loading, assignment, saving."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fxshard.errors import ConfigError
from tests.numerics.harness import (
    UNSHARDED,
    Prepare,
    Run,
    Tools,
    check,
    check_against_unsharded,
    check_bitwise,
    check_each,
    full,
    fxshard_system,
    only_shard,
    shard_and_compile,
    shard_blocks,
    start,
    train_step,
)
from tests.numerics.models import WIDTH
from tests.numerics.scenarios import ONE_BLOCK, REGRESSION
from tests.pairwise import each_once
from tests.ranks import group_folder, two_ranks

BOTH_WAYS = pytest.mark.parametrize("prepare", [shard_and_compile, only_shard])


class ConstantLinear(nn.Linear):
    """A linear layer whose initial values are the same on every rank and for every way of sharding it."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 / self.in_features)
        nn.init.constant_(self.bias, 0.5)


class Constant(nn.Module):
    """Two constant layers, a norm, and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ConstantLinear(WIDTH, 7), ConstantLinear(7, 5)])
        self.norm = nn.LayerNorm(5)
        self.head = ConstantLinear(5, WIDTH)
        self.register_buffer("scale", torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.sin(block(x))
        return self.head(self.norm(x)) * self.scale


def reset_all(model: nn.Module) -> None:
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


def shard_on_meta(model: nn.Module, tools: Tools) -> nn.Module:
    model.to("meta")
    shard_blocks(model, tools)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    reset_all(model)
    return tools.compile(model)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return what does not blow up the rounding of gradients: those of equal weights are nearly zero."""
    return torch.optim.SGD(parameters, lr=1e-2)


@two_ranks
def test_initialises_a_model_that_was_sharded_on_the_meta_device() -> None:
    check(replace(ONE_BLOCK, model=Constant, prepare=shard_on_meta, optimizer=sgd))


@two_ranks
def test_initialises_at_random_the_values_that_fsdp2_draws() -> None:
    check_bitwise(replace(ONE_BLOCK, prepare=shard_on_meta))


def load_into_meta(model: nn.Module, tools: Tools) -> nn.Module:
    whole = {name: x.clone() for name, x in model.state_dict().items()}
    model.to("meta")
    shard_blocks(model, tools)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=tools.system.fully_shard is not None)
    set_model_state_dict(model, whole, options=options)
    return tools.compile(model)


@two_ranks
def test_loads_a_full_state_dict_into_a_model_that_was_sharded_on_the_meta_device() -> None:
    check(replace(ONE_BLOCK, prepare=load_into_meta))


def convert_to_double(model: nn.Module, tools: Tools) -> nn.Module:
    model.float()
    shard_blocks(model, tools)
    return tools.compile(model.double())


@two_ranks
def test_converts_a_sharded_model_to_another_dtype() -> None:
    check_against_unsharded(replace(ONE_BLOCK, prepare=convert_to_double))


class LoadBack:
    """Keep the state of an early step and load it back at a later one."""

    def __init__(self, *, assign: bool, swap: bool = False) -> None:
        self.assign = assign
        self.swap = swap
        self.kept: dict[int, dict[str, Tensor]] = {}

    def __call__(self, run: Run, step: int) -> None:
        if step == 1:
            self.kept[id(run)] = {name: x.detach().clone() for name, x in run.model.state_dict().items()}
        if step == 2:
            torch.__future__.set_swap_module_params_on_conversion(self.swap)
            run.model.load_state_dict(self.kept.pop(id(run)), assign=self.assign)
            torch.__future__.set_swap_module_params_on_conversion(False)
            run.optim = run.scenario.optimizer(run.model.parameters())


def write_through_data(run: Run, step: int) -> None:
    if step == 2:
        with torch.no_grad():
            for p in run.named_parameters().values():
                p.data.mul_(0.5)
                p.add_(0.125)


@two_ranks
@BOTH_WAYS
def test_sees_what_is_loaded_or_written_through_data_between_steps(prepare: Prepare) -> None:
    changes: dict[str, Callable[[Run, int], None]] = {
        "through data": write_through_data,
        "copied": LoadBack(assign=False),
        "assigned": LoadBack(assign=True),
        "swapped": LoadBack(assign=False, swap=True),
    }
    check_each({name: replace(ONE_BLOCK, before_step=change, prepare=prepare) for name, change in changes.items()})


def assigned_like(old: Tensor, *, sharded: bool) -> nn.Parameter:
    """Return another parameter of the same shape, whole or sharded as the old one is."""
    whole = full(old) * 0.5
    if sharded and isinstance(old, DTensor):
        whole = distribute_tensor(whole, old.device_mesh, [Shard(0)], src_data_rank=None)
    return nn.Parameter(whole)


def assign_weight(run: Run, *, sharded: bool) -> None:
    owner: Any = getattr(run.model, "_orig_mod", run.model).head
    owner.weight = assigned_like(owner.weight, sharded=sharded)
    run.optim = run.scenario.optimizer(run.model.parameters())


@two_ranks
@each_once(sharded=[True, False], prepare=[shard_and_compile, only_shard])
def test_attaches_a_sharded_parameter_assigned_later_and_refuses_a_whole_one(sharded: bool, prepare: Prepare) -> None:
    scenario = replace(ONE_BLOCK, prepare=prepare)
    ours, reference = (start(scenario, s) for s in (fxshard_system(dtype=torch.float64), UNSHARDED))
    for run in (ours, reference):
        train_step(run, 0)
    assign_weight(reference, sharded=sharded)
    if not sharded:
        with pytest.raises(ConfigError, match=r"head\.weight is sharded.*DTensor"):
            assign_weight(ours, sharded=False)
        return
    assign_weight(ours, sharded=True)
    for run in (ours, reference):
        train_step(run, 1)
        train_step(run, 2)
    torch.testing.assert_close(ours.losses, reference.losses, rtol=1e-9, atol=1e-11)


def start_from(path: str, run: Run) -> Run:
    """Return a run like the other, with the state that was saved."""
    fresh = start(run.scenario, run.system)
    with torch.no_grad():
        for p in fresh.model.parameters():
            p.fill_(7.0)
    model_state, optim_state = get_state_dict(fresh.model, fresh.optim)
    state: dict[str, Any] = {"model": model_state, "optim": optim_state}
    load(state, checkpoint_id=path)
    set_state_dict(fresh.model, fresh.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return fresh


@two_ranks
@BOTH_WAYS
def test_continues_from_a_distributed_checkpoint(prepare: Prepare) -> None:
    path = str(group_folder() / f"checkpoint-{prepare.__name__}")

    def save_and_load(run: Run, step: int) -> None:
        if run.system.ours and step == 2:
            model_state, optim_state = get_state_dict(run.model, run.optim)
            save({"model": model_state, "optim": optim_state}, checkpoint_id=path)
            fresh = start_from(path, run)
            run.model, run.optim = fresh.model, fresh.optim

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_bitwise(replace(ONE_BLOCK, before_step=save_and_load, prepare=prepare))


@two_ranks
def test_gathers_a_full_state_dict_equal_to_the_unsharded_one() -> None:
    ours, reference = (start(REGRESSION, s) for s in (fxshard_system(dtype=torch.float64), UNSHARDED))
    state = get_model_state_dict(ours.model, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(state, dict(reference.model.state_dict()), rtol=0.0, atol=0.0)


@two_ranks
def test_names_parameters_as_the_unsharded_model_does() -> None:
    ours, reference = (start(replace(ONE_BLOCK, prepare=only_shard), s) for s in (fxshard_system(), UNSHARDED))
    assert list(ours.model.state_dict()) == list(reference.model.state_dict())
    assert [name for name, _ in ours.model.named_parameters()] == [n for n, _ in reference.model.named_parameters()]
    train_step(ours, 0)
    assert list(ours.model.state_dict()) == list(reference.model.state_dict())
