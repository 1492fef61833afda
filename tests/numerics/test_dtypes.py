"""Parameters of several dtypes in one unit, and gradients in a dtype of their own (`grad_dtype`)."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import SGD

import fxshard
from fxshard.errors import ConfigError
from tests.numerics.harness import (
    EAGER,
    Prepare,
    Tools,
    blocks_of,
    check_bitwise,
    check_inductor,
    compile_module,
    full,
    fxshard_system,
    only_shard,
    shard_and_compile,
    shard_blocks,
    sharded,
    sharded_as,
    start,
    train_step,
)
from tests.numerics.models import MLP, WIDTH
from tests.numerics.scenarios import REGRESSION
from tests.pairwise import slow
from tests.ranks import two_ranks

Override = Callable[[nn.Parameter], Any]
HAS_OVERRIDE = "param_dtype_override_fn" in {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}


@dataclasses.dataclass(frozen=True)
class LaterPolicy(MixedPrecisionPolicy):
    """torch's policy, with the field that it has from 2.15 on."""

    param_dtype_override_fn: Any = None


def policy_of(override: Override, **kwargs: Any) -> MixedPrecisionPolicy:
    made = MixedPrecisionPolicy if HAS_OVERRIDE else LaterPolicy
    arguments: dict[str, Any] = {"param_dtype": torch.bfloat16, "param_dtype_override_fn": override, **kwargs}
    return made(**arguments)


class MixedBlock(nn.Module):
    """A block that normalises in fp32 and multiplies in the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mix(self.norm(x.float()).to(self.mix.weight.dtype))
        return x + y


class Mixed(nn.Module):
    """Blocks in which several dtypes meet."""

    def __init__(self, weights: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        for module in [self.head, *(block.get_submodule("mix") for block in self.blocks)]:
            module.to(weights)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y.float()


def norms_apart(model: nn.Module, tools: Tools) -> None:
    """Make units of their own of what FSDP2 wants in another unit than the weights."""
    for block in blocks_of(model):
        tools.shard(block.get_submodule("norm"), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))


def stored_in(tools_prepare: Prepare) -> Prepare:
    """Ours makes one unit of a block; FSDP2 asserts that a unit has one dtype."""

    def prepare(model: nn.Module, tools: Tools) -> nn.Module:
        if not tools.system.ours:
            norms_apart(model, tools)
        return tools_prepare(model, tools)

    return prepare


STORED = replace(
    REGRESSION,
    model=partial(Mixed, torch.bfloat16),
    cast_model=False,
    shard_kwargs={"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
)


@two_ranks
@pytest.mark.parametrize("prepare", [shard_and_compile, only_shard])
def test_trains_fp32_norms_beside_bf16_weights_in_one_unit(prepare: Prepare) -> None:
    check_bitwise(replace(STORED, prepare=stored_in(prepare)))


def keep_norms(model: nn.Module, tools: Tools) -> MixedPrecisionPolicy:
    norms = {id(p) for block in blocks_of(model) for p in block.get_submodule("norm").parameters()}
    return policy_of(
        lambda p: torch.float32 if id(p) in norms else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def overridden(compiled: bool) -> Prepare:
    """Ours keeps the norms of a unit in fp32; FSDP2 does where it can, and else has them in units of their own."""

    def prepare(model: nn.Module, tools: Tools) -> nn.Module:
        policy = keep_norms(model, tools)
        if not tools.system.ours and not HAS_OVERRIDE:
            norms_apart(model, tools)
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        inner = replace(tools.scenario, shard_kwargs={"mp_policy": policy})
        shard_blocks(model, replace(tools, scenario=inner))
        return tools.compile(model) if compiled else model

    return prepare


@two_ranks
@pytest.mark.parametrize("compiled", [True, False])
def test_gathers_norms_in_their_own_dtype_where_the_policy_says_so(compiled: bool) -> None:
    check_bitwise(replace(REGRESSION, model=Mixed, prepare=overridden(compiled)))


@pytest.mark.slow
@two_ranks
def test_compiled_code_gathers_two_dtypes_of_a_unit() -> None:
    # Inductor keeps fp32 between fused bf16 operations, where eager rounds: a bf16 ulp is 2**-8.
    check_inductor(replace(REGRESSION, model=Mixed, prepare=overridden(compiled=True)), rtol=2**-6, atol=2**-6)


@two_ranks
@pytest.mark.skipif(not HAS_OVERRIDE, reason="the policy has param_dtype_override_fn from torch 2.15 on")
def test_adopts_and_releases_a_unit_with_two_dtypes() -> None:
    def prepare(model: nn.Module, tools: Tools) -> nn.Module:
        by_torch = replace(tools.system, fully_shard=torch.distributed.fsdp.fully_shard)
        model = overridden(compiled=False)(model, replace(tools, system=by_torch))
        if tools.system.ours:
            model = fxshard.adopt(fxshard.release(fxshard.adopt(model)))
        return tools.compile(model)

    check_bitwise(replace(REGRESSION, model=Mixed, prepare=prepare))


@two_ranks
def test_reads_a_parameter_in_the_dtype_that_was_chosen_for_it() -> None:
    run = start(replace(REGRESSION, model=Mixed, prepare=overridden(compiled=False)), fxshard_system())
    seen: dict[str, torch.dtype] = {}

    def look(module: nn.Module, args: Any) -> None:
        seen.update({name: getattr(module, name).dtype for name in ("weight", "bias")})

    block = next(iter(blocks_of(run.model)))
    block.get_submodule("norm").register_forward_pre_hook(look)
    train_step(run, 0)
    assert seen == {"weight": torch.float32, "bias": torch.float32}
    block.get_submodule("mix").register_forward_pre_hook(look)
    train_step(run, 1)
    assert seen == {"weight": torch.bfloat16, "bias": torch.bfloat16}


def test_explains_a_unit_with_two_dtypes(mesh: DeviceMesh) -> None:
    model = Mixed()
    norms = {id(p) for block in blocks_of(model) for p in block.get_submodule("norm").parameters()}
    policy = policy_of(lambda p: torch.float32 if id(p) in norms else None, cast_forward_inputs=False)
    fxshard.fully_shard(model, mesh=mesh, mp_policy=policy)
    explanation = fxshard.explain(model, torch.ones(2, WIDTH), options=EAGER)
    moved = explanation.frames[0].collectives("forward", "insert_collectives")
    assert Counter(cost.dtype for cost in moved) == {"f32": 1, "bf16": 1}


def over_replicas(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return compile_module(fxshard.fully_shard(model, mesh=mesh), EAGER)


def shard(model: nn.Module, way: str) -> nn.Module:
    if way == "inductor":
        return sharded_as(model, "compiled", lower=way)
    return over_replicas(model) if way == "replicas" else sharded_as(model, way)


def set_it(model: nn.Module, names: str) -> None:
    for name, parameter in model.named_parameters():
        if names in name:
            parameter.grad_dtype = torch.float32


def loss(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    out: Tensor = model(x.bfloat16())
    return out.float().pow(2).mean()


@two_ranks
@pytest.mark.parametrize("names", ["", slow("weight")])
@pytest.mark.parametrize(
    ("way", "after"),
    [
        ("one line", False),
        ("compiled", False),
        ("compiled", True),
        ("eager", False),
        slow("eager", True),
        slow("in parts", False),
        slow("replicas", False),
        slow("inductor", True),
    ],
)
def test_sums_of_bf16_gradients_are_those_of_unsharded_training(way: str, after: bool, names: str) -> None:
    plain = MLP(1).bfloat16()
    model = copy.deepcopy(plain)
    set_it(plain, names)
    if not after:
        set_it(model, names)
    run = shard(model, way)
    if after:
        set_it(model, names)
    for step in range(8):
        loss(plain, step).backward()
        loss(run, step).backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert found.grad.dtype is expected.grad.dtype
        if names in name:
            mean = expected.grad.double()
            dist.all_reduce(mean)
            # Inductor rounds less to bf16 within a backward.
            rtol, atol = (0.1, 1e-3) if way == "inductor" else (1e-6, 1e-7)
            torch.testing.assert_close(full(found.grad).double(), mean / 2, rtol=rtol, atol=atol)


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("way", ["compiled", slow("eager")])
def test_microbatches_are_added_up_and_stepped_with_in_it(way: str) -> None:
    plain = MLP(1).bfloat16()
    model = copy.deepcopy(plain)
    for each in (plain, model):
        set_it(each, "")
    run: Any = shard(model, way)
    ours, theirs = SGD(model.parameters(), lr=0.1), SGD(plain.parameters(), lr=0.1)
    for step in range(8):
        with fxshard.no_sync(run) if step % 4 < 3 else nullcontext():
            loss(run, step).backward()
        loss(plain, step).backward()
        if step % 4 < 3:
            continue
        for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
            assert expected.grad is not None
            assert found.grad is not None
            assert found.grad.dtype is torch.float32
            dist.all_reduce(expected.grad)
            expected.grad /= 2
            torch.testing.assert_close(full(found.grad), expected.grad, rtol=1e-6, atol=1e-7)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(found.detach()), expected.detach())


@two_ranks
def test_fsdp2_has_none() -> None:
    model = MLP(1).bfloat16()
    set_it(model, "weight")
    sharded(model)
    with pytest.raises(ConfigError, match=r"(?s)FSDP2 has no grad_dtype: .*weight \(torch\.float32\).*whole=True"):
        fxshard.release(model)
    whole = fxshard.release(model, whole=True)
    assert {p.grad_dtype for name, p in whole.named_parameters() if "weight" in name} == {torch.float32}


def test_explain_shows_it() -> None:
    model = MLP(1).bfloat16()
    set_it(model, "")
    explained = fxshard.explain(model, torch.ones(2, WIDTH).bfloat16(), world_size=4)
    shards = [shard for frame in explained.frames for unit in frame.plan.units.values() for shard in unit.shards]
    assert {shard.grad_dtype for shard in shards} == {torch.float32}
