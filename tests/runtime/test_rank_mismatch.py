"""Ranks that run different things get an error instead of a hang; ranks that only look different train on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fxshard import ConfigError, RankMismatchError, fully_shard
from fxshard.compile import backend
from tests.numerics.harness import (
    EAGER,
    Batch,
    Run,
    Scenario,
    check_against_unsharded,
    check_bitwise,
    check_inductor,
    compile_module,
)
from tests.numerics.models import MLP, WIDTH, rows
from tests.pairwise import slow
from tests.ranks import WORLD_SIZE, fresh_ranks, group_folder, two_ranks

SECONDS = 20.0
LOAD = 4  # seconds that a second of computing may take where four ranks and two compilers share the cores
EAGER_OR_COMPILED = pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What one rank trains."""

    model: Callable[[], nn.Module] = MLP
    shard: Mapping[str, Any] = field(default_factory=dict)
    lower: str = "eager"
    per_block: bool = False

    def build(self) -> nn.Module:
        model = self.model()
        # A launch for each unit, of the same tensors whatever was measured here.
        options = {"lower": self.lower, "schedule": "fsdp2", "hardware": "cpu"}
        for block in model.get_submodule("blocks").children():
            fully_shard(block, **self.shard)
            if self.per_block:
                block.compile(backend="fxshard", options=options)
        fully_shard(model, **self.shard)
        return model if self.per_block else compile_module(model, options)


def of_rank(*values: Any) -> Any:
    return values[dist.get_rank()]


def train_step(model: nn.Module, width: int = WIDTH, count: int = 3) -> None:
    model(torch.ones(count, width)).square().mean().backward()


@contextmanager
def refused(message: str = "the ranks launch different collectives", lower: str = "eager") -> Iterator[None]:
    """Expect the error, and in time where no C++ compiler works for it; what this process computes does not count."""
    began, worked = time.monotonic(), time.process_time()
    with pytest.raises(RankMismatchError, match=message):
        yield
    waited = time.monotonic() - began - LOAD * (time.process_time() - worked)
    assert waited < SECONDS or lower == "inductor"


def difference(number: int, ours: str, theirs: str, *, kind: str = "forward") -> str:
    """Return a pattern for the first difference between rank 0 and rank 1; runs count from where the pool stands."""
    lines = (
        f"collective {number} is the first that differs:\n    rank 0 ({kind}): {ours}\n    rank 1 ({kind}): {theirs}"
    )
    return r"In run \d+, " + re.escape(f"{lines}\nBuild, shard and compile")


def wide() -> nn.Module:
    return MLP(width=WIDTH + 2)


def three_blocks() -> nn.Module:
    return MLP(num_blocks=3)


@two_ranks
@EAGER_OR_COMPILED
def test_different_models(lower: str) -> None:
    model = Setup(model=of_rank(MLP, three_blocks), lower=lower).build()
    ours = "all_gather f32[72 -> 144], f32[6 -> 12] on group '0' for root  # %unshard_root"
    theirs = "all_gather f32[337 -> 674] on group '0' for blocks.2  # %unshard_blocks_2"
    with refused(difference(3, ours, theirs), lower=lower):
        train_step(model)


@two_ranks
@EAGER_OR_COMPILED
def test_different_shapes_of_parameters(lower: str) -> None:
    model = Setup(model=of_rank(MLP, wide), lower=lower).build()
    end = "on group '0' for blocks.0  # %unshard_blocks_0"
    ours, theirs = (f"all_gather {x} {end}" for x in ("f32[337 -> 674]", "f32[449 -> 898]"))
    with refused(difference(1, ours, theirs), lower=lower):
        train_step(model, width=of_rank(WIDTH, WIDTH + 2))


@two_ranks
def test_different_shapes_of_parameters_of_a_model_that_is_not_compiled() -> None:
    # gloo would end the process from a thread of its own.
    model = fully_shard(nn.Linear(3, of_rank(4, 8), bias=False))
    end = "per rank on group '0' for root  # outside of graphs"
    ours, theirs = (f"all_gather of all parameters, read outside of graphs, in f32[{n}] {end}" for n in (6, 12))
    with refused(difference(1, ours, theirs, kind="read")):
        train_step(model, width=3)


@two_ranks
@pytest.mark.parametrize("per_block", [True, False])
def test_different_dtypes_of_the_gathered_parameters(per_block: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=of_rank(torch.float32, torch.bfloat16))
    model = Setup(shard={"mp_policy": policy}, per_block=per_block).build()
    end = "on group '0' for blocks.0  # %unshard_blocks_0"
    ours, theirs = (f"all_gather {x}[337 -> 674] {end}" for x in ("f32", "bf16"))
    with refused(difference(1, ours, theirs)):
        train_step(model)


@two_ranks
@pytest.mark.parametrize("lower", ["eager", slow("inductor")])
def test_different_dtypes_of_the_reduction_which_backward_finds(lower: str) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=of_rank(torch.float32, torch.bfloat16))
    model = Setup(shard={"mp_policy": policy}, lower=lower).build()
    loss = model(torch.ones(3, WIDTH)).square().mean()
    ours, theirs = (f"reduce_scatter avg {x}[156 -> 78] on group '0' for root  # %reduce_root" for x in ("f32", "bf16"))
    with refused(difference(3, ours, theirs, kind="backward"), lower=lower):
        loss.backward()


@two_ranks
def test_different_resharding_which_backward_finds() -> None:
    model = Setup(shard={"reshard_after_forward": of_rank(True, False)}).build()
    loss = model(torch.ones(3, WIDTH)).square().mean()
    with refused(r"rank 0 \(backward\): all_gather .*\n    rank 1 \(backward\): reduce_scatter "):
        loss.backward()


@pytest.mark.slow
@fresh_ranks  # torch takes equal meshes of different groups for one, which would confuse later tests
def test_different_groups_of_the_same_ranks() -> None:
    world = init_device_mesh("cpu", (WORLD_SIZE,))
    other = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    model = Setup(shard={"mesh": of_rank(world, other)}).build()
    with refused(r"rank 0 \(forward\): all_gather .* on group '0' .*\n    rank 1 .* on group '\d*[1-9]\d*'"):
        train_step(model)


@two_ranks
def test_a_frozen_parameter_on_one_rank() -> None:
    model = Setup().build()
    model.get_submodule("_orig_mod.head").requires_grad_(dist.get_rank() == 0)
    with refused():
        train_step(model)


@pytest.mark.slow
@two_ranks
def test_ranks_are_in_step_again_after_all_have_been_refused() -> None:
    different = Setup(model=of_rank(MLP, three_blocks)).build()
    for _ in range(2):
        with refused():
            train_step(different)
    model = Setup().build()
    for _ in range(2):
        train_step(model)


@pytest.mark.slow
@two_ranks
def test_an_evaluation_on_one_rank_before_training() -> None:
    model = Setup().build()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(3, WIDTH))  # gathers together with the training forward of the other rank
        with refused(r"rank 0 \(forward\): all_gather .*\n    rank 1 \(backward\): "):
            train_step(model)
        return
    loss = model(torch.ones(3, WIDTH)).square().mean()
    with refused(r"rank 0 \(forward\): all_gather .*\n    rank 1 \(backward\): "):
        loss.backward()


@two_ranks
def test_two_models_called_in_different_orders() -> None:
    models = [Setup(model=build).build() for build in (MLP, wide)]
    with refused():
        for model, width in of_rank([(models[0], WIDTH), (models[1], WIDTH + 2)], [(models[1], WIDTH + 2)]):
            train_step(model, width)


def join_hasty_group(seconds: float) -> None:
    """Replace the process group by one whose collectives fail soon."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.FileStore(str(group_folder() / "hasty"), WORLD_SIZE)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("fxshard_gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)


@pytest.mark.slow
@fresh_ranks
def test_a_rank_that_turns_off_a_known_path_is_refused_and_the_others_learn_why_their_collective_fails() -> None:
    join_hasty_group(5.0)
    model = Setup().build()
    for _ in range(3):
        train_step(model)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(3, WIDTH))
        with refused(r"rank 0 \(forward\): all_gather .*\n    rank 1 \(backward\): "):
            model(torch.ones(3, WIDTH))
        return
    loss = model(torch.ones(3, WIDTH)).square().mean()
    with refused(r"rank 0 \(forward\): all_gather .*\n    rank 1 \(backward\): "):
        loss.backward()


@two_ranks
def test_a_rank_whose_compilation_is_refused_tells_the_others_why() -> None:
    model = compile_module(Setup().build().get_submodule("_orig_mod"), {"lower": of_rank("eager", "no such thing")})
    if dist.get_rank() == 1:
        with pytest.raises(ConfigError, match="lower must be"):
            train_step(model)
    else:
        with refused(r"rank 1 could not compile what is run \d+ \(forward graph\) on rank 0: lower must"):
            train_step(model)


def slow_on_rank_1(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile, but take longer for it than a collective may."""
    time.sleep(5.0 * dist.get_rank())
    return backend.fxshard(gm, inputs, options=EAGER)


@pytest.mark.commands
@fresh_ranks
def test_ranks_that_compile_longer_than_the_timeout_of_the_group_meet() -> None:
    join_hasty_group(2.0)
    model: Any = torch.compile(Setup().build().get_submodule("_orig_mod"), backend=slow_on_rank_1)
    for _ in range(2):
        train_step(model)


# ---- what only looks different


def uneven_rows(step: int, rank: int) -> Batch:
    """Return batches of another size on every rank and in every step."""
    return rows(count=2 + rank + (step * (rank + 1)) % 3)(step, rank)


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("dynamic", [slow(True), slow(False), None])
def test_trains_with_other_batch_sizes_on_every_rank(dynamic: bool | None) -> None:
    check_bitwise(Scenario(model=MLP, batch=uneven_rows, compile_kwargs={"dynamic": dynamic}))


@pytest.mark.slow
@two_ranks
def test_trains_with_other_batch_sizes_on_every_rank_in_compiled_code() -> None:
    check_inductor(Scenario(model=MLP, batch=uneven_rows))


def recompile_on_rank_1(run: Run, step: int) -> None:
    if step in (1, 2) and dist.get_rank() == 1:
        torch._dynamo.reset()


@pytest.mark.slow
@two_ranks
def test_trains_on_where_one_rank_recompiles() -> None:
    check_bitwise(Scenario(model=MLP, batch=rows(), before_step=recompile_on_rank_1))


@pytest.mark.slow
@two_ranks
def test_trains_on_where_one_rank_takes_its_code_from_the_cache() -> None:
    check_inductor(Scenario(model=MLP, batch=rows(), before_step=recompile_on_rank_1))


def evaluate_on_all_ranks(run: Run, step: int) -> None:
    with torch.no_grad():
        run.model(torch.ones(3, WIDTH, dtype=run.system.dtype))


@pytest.mark.slow
@two_ranks
def test_trains_on_after_evaluations_on_all_ranks() -> None:
    check_bitwise(Scenario(model=MLP, batch=rows(), before_step=evaluate_on_all_ranks))


def two_forwards_before_a_backward(run: Run, step: int) -> Tensor:
    losses = [run.loss(step + i) for i in range(2)]
    torch.stack(losses).sum().backward()
    return losses[0]


@two_ranks
def test_trains_with_two_forwards_before_a_backward() -> None:
    check_against_unsharded(Scenario(model=MLP, batch=rows(), backward=two_forwards_before_a_backward))
