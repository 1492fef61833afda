"""Hooks around the all_gather that do unusual things, or do them at unusual times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import fxshard
from fxshard import ConfigError, MixedPrecisionPolicy, UnsupportedGraph
from fxshard.runtime.parameters import local_of
from tests.numerics.extension_bodies import Factored, Rowwise, odd, on_four_ranks, sharded_odd
from tests.numerics.float8 import Float8Weight
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    Run,
    adamw,
    check_bitwise,
    check_inductor,
    compare,
    compile_module,
    fxshard_system,
    only_shard,
    train,
    with_a_break,
    world_mesh,
)
from tests.numerics.microbatches import several
from tests.numerics.models import WIDTH
from tests.pairwise import slow
from tests.ranks import two_ranks
from tests.state import processes

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


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
        pytest.param({"shard_kwargs": {"mp_policy": BFLOAT16}}, id="mixed precision", marks=pytest.mark.slow),
        pytest.param({"prepare": with_a_break, "backward": several}, id="two graphs", marks=pytest.mark.slow),
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
    which = odd()
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
    model = sharded_odd()
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
    model = sharded_odd()
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
