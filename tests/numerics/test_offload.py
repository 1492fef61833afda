"""`offload_policy=CPUOffloadPolicy()` trains as in FSDP2 and as unsharded; copies run as late as they may.

On a CPU mesh host and device are one: copies are made all the same, each when it is waited for, and what is freed or
overwritten too early shows as a wrong number.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.ir import ops
from fxshard.sharding.sharded_module import plain_module, units_under
from tests.numerics.harness import (
    Run,
    Tools,
    assert_same_tensors,
    blocks_of,
    check,
    check_against_unsharded,
    check_bitwise,
    check_inductor,
    compile_module,
    fxshard_system,
    loss_on_ones,
    only_compile,
    only_shard,
    shard_blocks,
    start,
    train_step,
    world_mesh,
)
from tests.numerics.loops import evaluate, scaled, step_in_backward
from tests.numerics.mesh_bodies import Body, checks_of
from tests.numerics.microbatches import kept, several
from tests.numerics.models import GPT, MLP, WIDTH
from tests.numerics.scenarios import LANGUAGE, REGRESSION
from tests.pairwise import slow
from tests.ranks import two_ranks

ON_HOST = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), **ON_HOST}
PLAIN = replace(REGRESSION, shard_kwargs=ON_HOST)
GPT_ON_HOST = replace(LANGUAGE, model=GPT, shard_kwargs=ON_HOST)


def last_block_alone(model: nn.Module, tools: Tools) -> nn.Module:
    """Offload one unit of three."""
    *others, last = blocks_of(model)
    for block in others:
        tools.shard(block, offload_policy=fxshard.OffloadPolicy())
    tools.shard(last)
    tools.shard(model, offload_policy=fxshard.OffloadPolicy())
    return tools.compile(model)


def released(run: Run, step: int) -> None:
    """FSDP2 goes on with the third step."""
    if step == 2 and run.system.ours:
        run.model = fxshard.release(run.model)


class NoInput(nn.Module):
    """Its graphs have no tensors to read but shards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self) -> Tensor:
        return torch.relu(self.first.weight @ self.second.weight) + self.second.bias


def loss_without_input(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model() * y.mean()).mean()


SCENARIOS: dict[str, Body] = {
    **checks_of(PLAIN),
    "one unit": lambda: check(replace(PLAIN, prepare=last_block_alone)),
    "kept between microbatches, no input": lambda: check(
        replace(PLAIN, model=NoInput, loss=loss_without_input, backward=kept)
    ),
    "microbatches of one block": lambda: check(replace(PLAIN, model=partial(MLP, 1), backward=several)),
    "microbatches, not compiled": lambda: check(replace(PLAIN, backward=several, prepare=only_shard)),
    "gpt": lambda: check(GPT_ON_HOST),
    "bfloat16": lambda: check_bitwise(replace(PLAIN, shard_kwargs=BF16)),
    "scaled": lambda: check(scaled(PLAIN)),
    "evaluated": lambda: check(replace(PLAIN, before_step=evaluate)),
    "released": lambda: check(replace(PLAIN, before_step=released)),
    "optimizer in backward": lambda: check(replace(PLAIN, before_step=step_in_backward, update=lambda run: None)),
    "kept after forward": lambda: check(replace(PLAIN, shard_kwargs={**ON_HOST, "reshard_after_forward": False})),
    "inductor": lambda: check_inductor(replace(PLAIN, model=partial(MLP, 1))),
    "inductor, bfloat16": lambda: check_inductor(replace(PLAIN, shard_kwargs=BF16), rtol=2**-6, atol=2**-6),
    "inductor, microbatches": lambda: check_inductor(replace(PLAIN, backward=several)),
    "inductor, gpt": lambda: check_inductor(GPT_ON_HOST),
}
DEFAULT = (
    *("compiled", "not compiled", "adopted", "called twice", "inductor"),
    *("one unit", "kept between microbatches, no input", "microbatches of one block"),
)


@two_ranks
@pytest.mark.parametrize("name", [name if name in DEFAULT else slow(name) for name in SCENARIOS])
def test_trains_as_without(name: str) -> None:
    SCENARIOS[name]()


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("options", [{"streams": "side"}, {"streams": "off"}, {"prefetch": "off"}, {"bucket": 1.0}])
def test_trains_as_without_in_any_schedule(options: dict[str, Any], lower: str) -> None:
    system = fxshard_system(dtype=torch.float64, lower=lower, **options)
    check_against_unsharded(replace(PLAIN, backward=several), system=system)


@two_ranks
def test_half_of_the_bytes_are_offloaded_by_whole_units() -> None:
    torch.manual_seed(0)
    model = compile_module(MLP(), options={"lower": "eager", "offload": {"params": 0.5}})
    loss_on_ones(model).backward()
    units = units_under(plain_module(model))
    offloaded = [unit.label for unit in units if unit.settings.offload is not None]
    total = sum(unit.plan.shard_bytes for unit in units)
    on_host = sum(unit.plan.shard_bytes for unit in units if unit.settings.offload is not None)
    assert offloaded == ["blocks.1"]
    assert 0 < on_host <= total / 2
    said = fxshard.explanation_of(model)
    assert (said.offloaded, said.host_bytes, said.device_bytes) == (("blocks.1",), on_host, total - on_host)
    assert "on the host (blocks.1)" in repr(said)


@pytest.mark.slow
@two_ranks
def test_one_line_trains_as_unsharded_with_any_part_offloaded() -> None:
    for part in (0.5, 1):
        system = fxshard_system(dtype=torch.float64, offload={"params": part, "optimizer": True})
        check_against_unsharded(replace(PLAIN, prepare=only_compile, shard_kwargs={}), system=system)


@two_ranks
def test_gradients_and_optimizer_state_are_where_the_shards_are() -> None:
    """And every copy of a step stands in its graphs."""
    run = start(PLAIN, fxshard_system())
    train_step(run, 0)
    for unit in units_under(plain_module(run.model)):
        assert unit.plan.offload is not None
        assert all(shard.flat.device.type == "cpu" for shard in unit.shards)
    for state in run.optim.state.values():
        assert all(value.device.type == "cpu" for value in state.values() if isinstance(value, DTensor))
    (frame,) = fxshard.explanation_of(run.model).frames
    for stage, expected in (("forward", [3, 0]), ("backward", [2, 3])):  # the root stays gathered
        graph = frame.running(stage).graph
        found = [len(graph.find_nodes(op="call_function", target=op)) for op in ops.BETWEEN_HOST_AND_DEVICE]
        assert found == expected


@two_ranks
def test_full_state_is_that_of_the_plain_module_and_can_be_loaded() -> None:
    torch.manual_seed(0)
    model = MLP()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    shard_blocks(model, Tools(system=fxshard_system(), scenario=PLAIN))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step() -> dict[str, Tensor]:
        optim.zero_grad()
        loss_on_ones(model).backward()
        optim.step()
        return fxshard.full_state_dict(model, recipient_rank=None)

    assert_same_tensors(fxshard.full_state_dict(model, recipient_rank=None), expected, "state", rtol=0, atol=0)
    states = step(), fxshard.full_optim_state_dict(model, optim, recipient_rank=None)
    later = step()
    fxshard.load_full_state_dict(model, states[0])
    fxshard.load_full_optim_state_dict(model, optim, states[1])
    assert_same_tensors(step(), later, "state after a load", rtol=0, atol=0)


@two_ranks
def test_gives_back_a_plain_model() -> None:
    torch.manual_seed(0)
    model = MLP()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    fxshard.fully_shard(model, mesh=world_mesh(), offload_policy=CPUOffloadPolicy())
    plain = fxshard.release(model, whole=True)
    assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())
