"""Hooks around the all_gather that do unusual things, or do them at unusual times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard import ConfigError, UnsupportedGraph
from fxshard.runtime.parameters import local_of
from tests.numerics.float8 import Float8Weight, give_hooks
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    Run,
    Scenario,
    adamw,
    check_bitwise,
    check_inductor,
    compare,
    compile_module,
    fxshard_system,
    only_shard,
    sharded,
    train,
    with_a_break,
    world_mesh,
)
from tests.numerics.microbatches import several
from tests.numerics.models import WIDTH, rows
from tests.numerics.scenarios import BF16
from tests.pairwise import slow
from tests.ranks import two_ranks
from tests.state import processes


class Rowwise(Float8Weight):
    """Sent as fp8, a scale in float32 for each row, and its sign: three tensors, of sizes that align with nothing."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Rowwise:
        return cls(inner["rows"])

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        scale = 448 / self.rows.abs().amax(1, keepdim=True).clamp(1e-12)
        values = (self.rows.abs() * scale).to(torch.float8_e4m3fn)
        return (values, scale, self.rows.sign().to(torch.int8)), {"shift": torch.full((), 0.5), "kind": ["rowwise", 1]}

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        values, scale, sign = all_gather_outputs
        shift = 1 / metadata["shift"]
        whole = (values.float() / scale * sign * shift).to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (values, scale, sign, whole)


class Factored(Float8Weight):
    """The second hook reads an attribute that is in no context."""

    factor: float

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        made = super().__torch_dispatch__(func, types, args, kwargs)
        given = [each for each in args if isinstance(each, cls)]
        if isinstance(made, cls) and given and hasattr(given[0], "factor"):
            made.factor = given[0].factor
        return made

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.rows.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        whole = all_gather_outputs[0].to(param_dtype) * self.factor
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (whole,)


class Odd(nn.Module):
    """A unit of rows and columns in odd numbers, with plain parameters between those with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 5), nn.Linear(5, 6), nn.Linear(6, 6, bias=False)
        self.d = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.d(torch.relu(self.c(self.b(torch.relu(self.a(x)))))))


class OddModel(nn.Module):
    def __init__(self, *, tied: bool = False, num_blocks: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.extra = nn.Linear(WIDTH, WIDTH)
            self.extra.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.extra(self.head(x)) if hasattr(self, "extra") else self.head(x))


def odd(cls: type[Float8Weight] = Rowwise, *, tied: bool = False, num_blocks: int = 1, **kwargs: Any) -> Scenario:
    """A model of which only matrices of even rows have hooks: no padding."""

    def model() -> nn.Module:
        made = OddModel(tied=tied, num_blocks=num_blocks)
        for module in (each for block in made.blocks for each in (block.b, block.c)):
            give_hooks(cast(nn.Module, module), cls)
        give_hooks(made.head, cls)
        if tied:
            made.extra.weight = made.head.weight
        factor = 1.0
        for parameter in made.parameters():
            if isinstance(parameter, Factored) or isinstance(parameter.data, Factored):
                factor += 0.5
                cast(Any, parameter).factor = factor
        return made

    return Scenario(model=model, batch=rows(), cast_model=False, **kwargs)


def four(hidden: int, **kwargs: Any) -> Scenario:
    """A unit of which some ranks have no rows, or replicas of it."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return give_hooks(nn.Sequential(nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)))

    return Scenario(model=model, batch=rows(), cast_model=False, **kwargs)


def on_four_ranks() -> None:
    """Ranks without rows, and two replicas of two ranks each."""
    check_bitwise(four(1))
    check_bitwise(four(5, prepare=only_shard))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for scenario in (four(6), four(3), four(6, prepare=only_shard), four(6, backward=several)):
        check_bitwise(replace(scenario, shard_kwargs={"mesh": mesh}))


@two_ranks
@pytest.mark.parametrize("cls", [Rowwise, Factored, slow(Float8Weight)])
def test_trains_as_fsdp2_with_several_tensors_and_attributes(cls: type[Float8Weight]) -> None:
    check_bitwise(odd(cls))
    check_bitwise(odd(cls, prepare=only_shard))


@two_ranks
@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({"tied": True}, id="tied"),
        pytest.param({"shard_kwargs": {"mp_policy": BF16}}, id="mixed precision", marks=pytest.mark.slow),
        pytest.param(
            {"prepare": with_a_break, "backward": several, "num_blocks": 2}, id="two graphs", marks=pytest.mark.slow
        ),
    ],
)
def test_trains_as_fsdp2_in_other_settings(kwargs: dict[str, Any]) -> None:
    check_bitwise(odd(**kwargs))


@pytest.mark.slow
@two_ranks
def test_trains_in_code_of_inductor() -> None:
    check_inductor(odd(), rtol=1e-4, atol=1e-5)


@two_ranks
@pytest.mark.parametrize(
    "options", [slow({"bucket": 1.0}), {"bucket": 6e-5, "streams": "side"}, slow({"resident_gib": 1.0})]
)
def test_passes_move_bytes_that_align_with_nothing(options: dict[str, Any]) -> None:
    which = odd(num_blocks=2)
    compare(train(which, fxshard_system(**options)), train(which, FSDP2), rtol=0.0, atol=0.0)


def between_steps(run: Run, step: int) -> None:
    """Look at the model, set back what was trained half-way, and look again."""
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        run.extra.append(run.model.eval()(x))
        cast(Any, run.model).reshard()
        kept = {name: value.detach().clone() for name, value in run.named_parameters().items()}
        for number, parameter in enumerate(run.named_parameters().values()):
            (parameter.mul_ if number % 2 else cast(Any, parameter).to_local().mul_)(0.5)
        run.extra.append(run.model(x))
        cast(Any, run.model).reshard()
        if step % 2:
            run.model.load_state_dict({name: kept[name.replace("_orig_mod.", "")] for name in run.model.state_dict()})
        run.extra.append(run.model.train()(x))
        cast(Any, run.model).reshard()


@two_ranks
@pytest.mark.parametrize("options", [slow({}), {"resident_gib": 1.0}])
def test_what_changes_between_steps_is_gathered(options: dict[str, Any]) -> None:
    which = odd(Float8Weight, before_step=between_steps)
    compare(train(which, fxshard_system(**options)), train(which, FSDP2), rtol=0.0, atol=0.0)


@two_ranks
def test_steps_in_two_parts_with_hooks() -> None:
    def overlapped(parameters: Any) -> Any:
        return fxshard.overlap_step(adamw(parameters))

    ours = train(odd(Float8Weight, optimizer=overlapped), fxshard_system())
    compare(ours, train(odd(Float8Weight), FSDP2), rtol=0.0, atol=0.0)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_trains_on_one_rank() -> None:
    """Also what FSDP2 does not, which there gives the second hook the first tensor alone."""
    check_bitwise(odd(Factored))
    uncompiled = train(odd(prepare=only_shard), fxshard_system())
    compare(train(odd(), fxshard_system()), uncompiled, rtol=0.0, atol=0.0)
    compare(train(odd(), fxshard_system(lower="inductor")), uncompiled, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.multi_rank
def test_trains_as_fsdp2_on_four_ranks() -> None:
    processes.run(4, on_four_ranks)


@two_ranks
def test_trains_after_inference_mode() -> None:
    model: Any = sharded(give_hooks(OddModel()), mesh=world_mesh())
    compiled, x = compile_module(model, EAGER), torch.ones(2, WIDTH)
    with torch.inference_mode():
        before = compiled(x)
        assert torch.equal(model(x), before)
        model.unshard()
    compiled(x).sum().backward()
    model.reshard()
    compiled(x).sum().backward()
    assert torch.equal(compiled(x), before)


# ---- what backward would decode with another scale than that of the bytes


def set_scale(model: nn.Module, scale: float) -> None:
    for parameter in model.parameters():
        local = cast(Any, parameter)._local_tensor
        if isinstance(local, Float8Weight):
            local.scale = torch.tensor(scale)


@two_ranks
@pytest.mark.parametrize("compiled", [True, False])
def test_refuses_a_backward_whose_forward_had_another_scale(compiled: bool) -> None:
    model: Any = sharded(give_hooks(OddModel()), mesh=world_mesh())
    run, x = compile_module(model, EAGER) if compiled else model, torch.ones(2, WIDTH)
    (run(x) + run(2 * x)).sum().backward()
    set_scale(model, 64.0)
    first = run(x).sum()
    set_scale(model, 32.0)
    second = run(x).sum()
    second.backward()
    with pytest.raises(UnsupportedGraph, match=r"changed between forward and backward .*scale"):
        first.backward()


# ---- refusals


class Coded(Float8Weight):
    """Reads a tensor of its own in the second hook."""

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        whole = all_gather_outputs[0].to(param_dtype) + self.rows.sum()
        return whole, (whole,)


@two_ranks
def test_refuses_attributes_that_it_would_not_see() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(Coded(layer.weight.detach()))
    with pytest.raises(ConfigError, match=r"weight is a Coded .*fsdp_post_all_gather.* has no attribute 'rows'"):
        fxshard.fully_shard(layer, mesh=world_mesh())
    layer = nn.Linear(4, 4)
    weight = Factored(layer.weight.detach())
    weight.factor = 1.0
    layer.weight = nn.Parameter(weight)
    cast(Any, layer.weight).factor = 1.0
    fxshard.fully_shard(layer, mesh=world_mesh())
    layer(torch.ones(2, 4))
    cast(Any, layer.get_parameter("weight"))._local_tensor.factor = 2.0
    with pytest.raises(ConfigError, match=r"weight is a Factored .* attributes have changed .*1.0.*2.0"):
        layer(torch.ones(2, 4))
    assert local_of(cast(Any, layer.get_parameter("weight"))).shape == (2, 4)
